"""The verb `demo`: trains a FANformer on text, exports it to Hugging Face and generates text, all on this machine.

The text is the source code of the Python standard library. The model is trained at tensor parallel 2, on two local
ranks; the training is stopped half-way and resumed.
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
from megatron_fanformer.demo.corpus import pack_standard_library
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.generate.generate import generate
from megatron_fanformer.generate.verb import GenerateConfig
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.prepare.documents import read_documents
from megatron_fanformer.prepare.prepare import prepare
from megatron_fanformer.prepare.verb import PrepareConfig
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.train.metrics import VALIDATION_PREFIX, loss_picture, read_metrics
from megatron_fanformer.train.start import start_run

VOCAB_SIZE, STEPS = 8192, 330
RUN = "run"
MARK = ".fanformer-demo"  # marks a folder as made by the demo, which may then remove it
VALIDATION = "held-out"
LOGITS_TOLERANCE = 1e-4  # absolute difference between the trainer's logits and transformers', both in float32
PROMPT = "def read_lines(path):\n"
NEW_TOKENS = 64
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "seed": 1}
MODEL = FANformerConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4, vocab_size=VOCAB_SIZE, seq_length=256
)


def run_demo(root: Path) -> None:
    """Run all steps of the demo in the folder `root`, and print a summary.

    Raises:
        InputError: the folder exists and was not made by an earlier demo, or a run in it has not ended.
        FanformerError: a step fails, or the export's logits differ from the trainer's.
    """
    started = time.monotonic()
    console = Console()
    _make_empty_folder(root)
    run, huggingface, loss_curve = root / RUN, root / "huggingface", root / "loss.png"
    with _step(console, 1, "documents: the standard library's source files"):
        train, held_out = pack_standard_library(root / "documents")
    with _step(console, 2, f"tokenizer: sentencepiece BPE, {VOCAB_SIZE:,} pieces"):
        texts = (text for shard in train for text in read_documents(shard) if isinstance(text, str))
        prefix = (root / TOKENIZER_MODEL).with_suffix("")
        train_sentencepiece(texts, prefix, vocab_size=VOCAB_SIZE, num_threads=usable_cores())
    with _step(console, 3, "tokens: Megatron .bin/.idx"):
        tokens = {"train": _tokenize(root, "train", train), VALIDATION: _tokenize(root, VALIDATION, [held_out])}
    with _step(console, 4, f"training: {STEPS} steps at tensor parallel 2, stopped half-way and resumed"):
        _train(root, console)
    with _step(console, 5, "conversion: to Hugging Face, reloaded, logits compared"):
        convert_checkpoint(run, huggingface, to="hf")
        difference = compare_logits(root, held_out)
        console.print(f"largest difference of logits: {difference:.1e}")
    with _step(console, 6, "generation: from the checkpoint, greedy and sampled"):
        for name, sampling in (("greedy", {}), ("sampled", SAMPLED)):
            config = GenerateConfig(checkpoint=str(run), prompts=(PROMPT,), max_new_tokens=NEW_TOKENS, **sampling)
            (generated,) = generate(config)
            console.print(f"[dim]{name}:[/dim]")
            console.print(PROMPT + generated.text, markup=False, highlight=False, style="cyan")
    entropy = unigram_entropy(root / "tokens" / VALIDATION)
    metrics = read_metrics(run)
    write_atomically(loss_curve, loss_picture(metrics, title="FANformer", entropy=entropy))
    validation = metrics[-1][f"{VALIDATION_PREFIX}{VALIDATION}"]
    speeds = [step["tokens_per_second"] for step in metrics]
    table = Table(title="Demo summary", show_header=False)
    for name, value in {
        "tokens": f"{tokens['train']:,} to train on, {tokens[VALIDATION]:,} held out",
        "parameters": f"{MODEL.num_parameters:,}",
        "training": f"{STEPS} steps, {metrics[-1]['tokens']:,} tokens, tensor parallel 2",
        "loss, first and last step": f"{metrics[0]['loss']:.3f}, {metrics[-1]['loss']:.3f} nats per token",
        "unigram entropy of held-out tokens": f"{entropy:.3f} nats per token",
        "validation loss": f"{validation:.3f} nats per token (perplexity {math.exp(validation):.1f})",
        "speed": f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s (median step)",
        "export against trainer, logits": f"{difference:.1e}",
        "time": f"{time.monotonic() - started:.0f} s",
        "run, checkpoints, TensorBoard": str(run),
        "Hugging Face folder": str(huggingface),
        "loss curve": str(loss_curve),
    }.items():
        table.add_row(name, value)
    console.print(table)


def _make_empty_folder(root: Path) -> None:  # in place of an earlier demo's, which is removed
    if root.exists():
        if not (root / MARK).exists():
            raise InputError(f"{root} exists and is not an earlier demo's folder; name another with --output")
        with run_lock(root / RUN):  # raises if a run in it has not ended
            shutil.rmtree(root)
    root.mkdir(parents=True)
    (root / MARK).touch()


@contextmanager
def _step(console: Console, number: int, title: str) -> Iterator[None]:  # prints the title, then the time
    console.rule(f"{number}. {title}", align="left")
    started = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - started:.1f} s[/dim]")


def _tokenize(root: Path, part: str, inputs: Sequence[Path]) -> int:
    """Prepare the token files of one part of the corpus; return the number of tokens."""
    output, tokenizer = str(root / "tokens" / part), str(root / TOKENIZER_MODEL)
    return prepare(PrepareConfig(inputs=tuple(map(str, inputs)), output=output, tokenizer=tokenizer)).manifest.tokens


def training_config(root: Path) -> dict[str, Any]:
    """Return the configuration of the demo's training run."""
    return {
        "model": dataclasses.asdict(MODEL),
        "parallel": {"tensor_model_parallel_size": 2},
        "runtime": {"device": "cpu"},
        "data": {
            "train_data": [str(root / "tokens" / "train")],
            "valid_data": {VALIDATION: [str(root / "tokens" / VALIDATION)]},
            "tokenizer": str(root / TOKENIZER_MODEL),
        },
        "optimizer": {"lr": 5e-3, "adam_beta2": 0.99, "adam_eps": 1e-8},
        "schedule": {"lr_decay_style": "linear", "lr_warmup_iters": STEPS // 10, "min_lr": 0.0},
        "training": {
            "run_dir": str(root / RUN),
            "train_iters": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "eval_interval": STEPS // 3,
            "eval_iters": 20,
            "exit_interval": STEPS // 2,
        },
        "checkpoint": {"keep": 2},
        "logging": {"log_interval": 25, "phase_interval": STEPS // 6},  # the default, 1,000, would show no phases
    }


def _train(root: Path, console: Console) -> None:
    """Run one training command twice: the first run stops half-way (`exit_interval`), the second goes on from there."""
    config = root / "train.yaml"
    config.write_text(yaml.safe_dump(training_config(root), sort_keys=False))
    command = ["train", "--config", str(config)]
    try:
        start_run(config, [], command)
        console.print("stopped half-way; the same command again:")
        start_run(config, [], command)
    except Interrupted:
        raise Interrupted(
            f"stopped in its training; the demo would begin anew, and {shlex.join([PROGRAM, *command])} goes on"
        ) from None


def compare_logits(root: Path, held_out: Path) -> float:
    """Return the largest difference between the trainer's logits and those of the reloaded export, on a held-out text.

    Raises FanformerError if the difference is above `LOGITS_TOLERANCE`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import megatron_fanformer.hf  # noqa: F401  registers the model with transformers' auto classes
    from megatron_fanformer.generate.models import load_model

    transformers_logging.disable_progress_bar()
    text = next(text for text in read_documents(held_out) if isinstance(text, str))
    ids = torch.tensor([load_tokenizer(root / TOKENIZER_MODEL).encode(text)[: MODEL.seq_length]])
    exported = AutoModelForCausalLM.from_pretrained(root / "huggingface", dtype=torch.float32).eval()
    with torch.inference_mode():
        exported_logits = exported(ids).logits
    with load_model(root / RUN) as model:
        trained_logits = model.logits(ids)
    difference = float((trained_logits - exported_logits).abs().max())
    if not difference <= LOGITS_TOLERANCE:  # NaN is refused, too
        raise FanformerError(
            f"the export's logits differ from the trainer's by {difference:.1e}, more than {LOGITS_TOLERANCE}"
        )
    return difference


def unigram_entropy(prefix: Path) -> float:
    """Return the loss, in nats per token, of a model that knows the token frequencies in a file and nothing else."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for document in range(len(dataset)):
        counts += np.bincount(dataset[document], minlength=VOCAB_SIZE)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
