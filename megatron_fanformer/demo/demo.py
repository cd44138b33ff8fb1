"""`demo`: from text to a trained FANformer to a Hugging Face folder to generated text, on this machine alone.

The text is the Python standard library's own source code, the layout tensor parallel 2 on two local ranks, and the
training is stopped half-way and resumed.
"""

import dataclasses
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.data.tokenizer import TOKENIZER_MODEL, load_tokenizer, train_sentencepiece
from megatron_fanformer.demo.corpus import Corpus, pack_standard_library
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.generate.generate import generate
from megatron_fanformer.generate.verb import GenerateConfig
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.prepare.documents import read_documents
from megatron_fanformer.prepare.prepare import prepare
from megatron_fanformer.prepare.verb import PrepareConfig
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime.device import VISIBLE_GPUS
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import VALIDATION_PREFIX, loss_picture, read_metrics
from megatron_fanformer.train.start import start_run

VOCAB_SIZE = 8192
STEPS = 330
MARK = ".fanformer-demo"  # a folder that contains it is the demo's own, and may be replaced
VALIDATION = "held-out"
LOGITS_TOLERANCE = 1e-4  # the trainer's own against transformers', absolute; both in float32
PROMPT = "def read_lines(path):\n"
NEW_TOKENS = 64
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "seed": 1}
NEXT = {
    "experiment mod --seeds 1 --mod.model_steps 100": "the fit of t mod 5, with which the paper begins",
    "experiment lipschitz --output {output}": "how far models spread near inputs",
    'experiment cost --cost.presets "[fanformer-300m]"': "what FAN costs, by formula and counted",
}
"""Commands to try after the demo, short forms of three of the paper's experiments, and the result of each."""
MODEL = FANformerConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4, vocab_size=VOCAB_SIZE, seq_length=256
)


class Places:
    """The paths of all that the demo makes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.documents = root / "documents"
        self.tokenizer = root / TOKENIZER_MODEL
        self.config = root / "train.yaml"
        self.run = root / "run"
        self.huggingface = root / "huggingface"
        self.loss_curve = root / "loss.png"

    def tokens(self, part: str) -> Path:
        """Return the prefix of the token files of `train` or `held-out`."""
        return self.root / "tokens" / part


def run_demo(output: Path) -> None:
    """Run the whole demo in the folder `output`, and print the results.

    Raises:
        InputError: the folder exists and is not an earlier demo's, or one is running in it.
        FanformerError: a step did not do what it should.
    """
    started = time.monotonic()
    console = Console()
    places = Places(output)
    _claim(places.root)
    with _step(console, 1, "documents: the standard library's source files"):
        corpus = pack_standard_library(places.documents)
    with _step(console, 2, f"tokenizer: sentencepiece BPE, {VOCAB_SIZE:,} pieces"):
        texts = (text for shard in corpus.train for text in read_documents(shard) if isinstance(text, str))
        prefix = places.tokenizer.with_suffix("")
        train_sentencepiece(texts, prefix, vocab_size=VOCAB_SIZE, num_threads=usable_cores())
    with _step(console, 3, "tokens: Megatron .bin/.idx"):
        tokens = {
            "train": _tokenize(places, "train", corpus.train),
            VALIDATION: _tokenize(places, VALIDATION, [corpus.held_out]),
        }
    with _step(console, 4, f"training: {STEPS} steps at tensor parallel 2, stopped half-way and resumed"):
        _train(places, console)
    with _step(console, 5, "conversion: to Hugging Face, reloaded, logits compared"):
        convert_checkpoint(places.run, places.huggingface, to="hf")
        difference = compare_logits(places, corpus)
        console.print(f"largest difference of logits: {difference:.1e}")
    with _step(console, 6, "generation: from the checkpoint, greedy and sampled"):
        sampled = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in SAMPLED.items())
        for name, sampling in (("greedy", {}), (sampled, SAMPLED)):
            config = GenerateConfig(
                checkpoint=str(places.run), prompts=(PROMPT,), max_new_tokens=NEW_TOKENS, **sampling
            )
            (generated,) = generate(config)
            console.print(f"[dim]{name}:[/dim]")
            console.print(PROMPT + generated.text, markup=False, highlight=False, style="cyan")
    entropy = unigram_entropy(places.tokens(VALIDATION))
    metrics = read_metrics(places.run)
    write_atomically(places.loss_curve, loss_picture(metrics, title="FANformer", entropy=entropy))
    validation = metrics[-1][f"{VALIDATION_PREFIX}{VALIDATION}"]
    speeds = [step["tokens_per_second"] for step in metrics]
    table = Table(title="Demo summary", show_header=False)
    for name, value in {
        "documents": f"{corpus.train_documents} to train on, {corpus.held_out_documents} held out",
        "tokens": f"{tokens['train']:,} to train on, {tokens[VALIDATION]:,} held out",
        "parameters": f"{MODEL.num_parameters:,}",
        "training": f"{STEPS} steps, {metrics[-1]['tokens']:,} tokens, tensor parallel 2",
        "loss, first and last step": f"{metrics[0]['loss']:.3f}, {metrics[-1]['loss']:.3f} nats per token",
        "unigram entropy of held-out tokens": f"{entropy:.3f} nats per token",
        "validation loss": f"{validation:.3f} nats per token (perplexity {math.exp(validation):.1f})",
        "speed": f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s (median step)",
        "export against trainer, logits": f"{difference:.1e}",
        "time": f"{time.monotonic() - started:.0f} s",
        "run, checkpoints, TensorBoard": str(places.run),
        "Hugging Face folder": str(places.huggingface),
        "loss curve": str(places.loss_curve),
    }.items():
        table.add_row(name, value)
    console.print(table)
    console.print("\n".join(next_lines(places)), markup=False, highlight=False, soft_wrap=True)


def _claim(root: Path) -> None:
    if root.exists():
        if not (root / MARK).exists():
            raise InputError(f"{root} exists and is not an earlier demo's folder; name another with --output")
        with run_lock(Places(root).run):
            shutil.rmtree(root)
    root.mkdir(parents=True)
    (root / MARK).touch()


@contextmanager
def _step(console: Console, number: int, title: str) -> Iterator[None]:
    console.rule(f"{number}. {title}", align="left")
    started = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - started:.1f} s[/dim]")


def _tokenize(places: Places, part: str, inputs: Sequence[Path]) -> int:
    output, tokenizer = str(places.tokens(part)), str(places.tokenizer)
    return prepare(PrepareConfig(inputs=tuple(map(str, inputs)), output=output, tokenizer=tokenizer)).manifest.tokens


def training_config(places: Places) -> dict[str, Any]:
    """Return the demo's training run."""
    return {
        "model": dataclasses.asdict(MODEL),
        "parallel": {"tensor_model_parallel_size": 2},
        "data": {
            "train_data": [str(places.tokens("train"))],
            "valid_data": {VALIDATION: [str(places.tokens(VALIDATION))]},
            "tokenizer": str(places.tokenizer),
        },
        "optimizer": {"lr": 5e-3, "adam_beta2": 0.99, "adam_eps": 1e-8},
        "schedule": {"lr_decay_style": "linear", "lr_warmup_iters": STEPS // 10, "min_lr": 0.0},
        "training": {
            "run_dir": str(places.run),
            "train_iters": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "eval_interval": STEPS // 3,
            "eval_iters": 20,
            "exit_interval": STEPS // 2,
        },
        "checkpoint": {"keep": 2},
        "logging": {"log_interval": 25, "phase_interval": STEPS // 6},  # the usual 1,000 would show no phases
    }


def _train(places: Places, console: Console) -> None:
    """Start one command twice: the first ends half-way (`exit_interval`), the second continues from its checkpoint.

    Raises:
        Interrupted: a signal stopped it; the same command is the demo, which removes what it has made.
    """
    values = training_config(places)
    config_from_dict(values)  # a mistake here is ours: let it show at once
    places.config.write_text(yaml.safe_dump(values, sort_keys=False))
    command = ["train", "--config", str(places.config)]
    try:
        start_run(places.config, [], command)
        console.print("stopped half-way; the same command again:")
        start_run(places.config, [], command)
    except Interrupted:
        train = f"{VISIBLE_GPUS}= {shlex.join(['megatron-fanformer', *command])}"  # no GPU, as for the demo itself
        raise Interrupted(f"stopped in its training; the demo would begin anew, and {train} goes on") from None
    last = read_metrics(places.run)[-1]["step"]
    if last != STEPS:
        raise FanformerError(f"the resumed run ended at step {last}, not {STEPS}")


def compare_logits(places: Places, corpus: Corpus) -> float:
    """Return the largest difference between the trainer's logits and the reloaded export's, on a held-out text.

    Raises:
        FanformerError: it is above the tolerance of the precision.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import megatron_fanformer.hf  # noqa: F401  registers the model with transformers' auto classes
    from megatron_fanformer.generate.models import load_model

    transformers_logging.disable_progress_bar()
    text = next(text for text in read_documents(corpus.held_out) if isinstance(text, str))
    ids = torch.tensor([load_tokenizer(places.tokenizer).encode(text)[: MODEL.seq_length]])
    exported = AutoModelForCausalLM.from_pretrained(places.huggingface, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = exported(ids).logits
    with load_model(places.run) as model:
        ours = model.logits(ids)[..., : MODEL.vocab_size].float()
    difference = float((ours - theirs).abs().max())
    if not difference <= LOGITS_TOLERANCE:
        raise FanformerError(
            f"the export's logits differ from the trainer's by {difference:.1e}, more than {LOGITS_TOLERANCE}"
        )
    return difference


def next_lines(places: Places) -> list[str]:
    """Return lines with three of the paper's experiments to try next."""
    output = shlex.quote(str(places.root / "lipschitz"))
    lines = ["Three of the paper's experiments to try next, in short forms:"]
    for command, result in NEXT.items():
        lines += [f"  {result}:", f"    megatron-fanformer {command.format(output=output)}"]
    return lines


def unigram_entropy(prefix: Path) -> float:
    """Return the entropy of a token file's frequencies, in nats: the loss of knowing them and nothing else."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for document in range(len(dataset)):
        counts += np.bincount(dataset[document], minlength=VOCAB_SIZE)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
