"""Measure what FP8 does to a FANformer's phases and loss: small models trained in bf16 and in FP8, and compared.

    python tools/fp8_phase.py                                 # docs/fp8-phase.md has the results
    python tools/fp8_phase.py --seeds 1 --steps 50 --output runs/short

Trained are a FANformer in bf16, in FP8 with its FAN map in bf16, and in FP8 altogether, and the Transformer of the same
width in bf16 and in FP8; and the FANformer in bf16 once more by the local layers, which sum and round otherwise: what
they change is what a training makes of rounding errors, of whatever kind. They run on a GPU that has FP8, else by
tests/engine_on_cpu, on one core. A training that is in the output folder already is not repeated.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from phase_errors import EDGES, ENGINE, VALIDATION, train

from megatron_fanformer import markdown
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.engine_on_cpu import installing

TRAINING_SECONDS = 7200  # a training that takes longer is stuck
LAST_STEPS = 50  # whose mean is the training loss that is compared
SHAPE = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 4, "seq_length": 128}


class Arm(NamedTuple):
    """A model in a number format."""

    name: str
    placement: str
    fp8: bool = False
    fp8_fan: bool = False
    layers: str = ENGINE


FAN_BF16, PLAIN_BF16 = Arm("FANformer bf16", "qkv"), Arm("Transformer bf16", "none")
BASES = {
    FAN_BF16: None,
    Arm("FANformer bf16, local layers", "qkv", layers="local"): FAN_BF16,
    Arm("FANformer FP8, FAN map bf16", "qkv", fp8=True): FAN_BF16,
    Arm("FANformer FP8, FAN map FP8", "qkv", fp8=True, fp8_fan=True): FAN_BF16,
    PLAIN_BF16: None,
    Arm("Transformer FP8", "none", fp8=True): PLAIN_BF16,
}
"""The arms, each with the one that it is compared with."""


def main() -> int:
    """Train, measure, write the JSON file, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/fp8-phase"), metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="trainings of each kind (3)")
    parser.add_argument("--recipe", choices=("tensorwise", "delayed", "blockwise"), default="tensorwise")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of a training (300)")
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="N", help="of the tokenizer (1024)")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"({default})")
    options = parser.parse_args()
    folder: Path = options.output.resolve()
    corpus = write_corpus(folder / f"corpus-{options.vocab_size}", options.vocab_size)
    has_fp8 = not devices.fp8_problem(options.recipe)
    if not has_fp8:
        devices.hide_gpus()
    stand_in: dict[str, Any] = {} if has_fp8 else {"backend": "gloo", "prepare": installing.install}
    with RankPool("cuda", TRAINING_SECONDS, **stand_in) as pool:
        trainings = {
            arm: [_trained(pool, arm, seed, options, corpus, folder) for seed in range(options.seeds)] for arm in BASES
        }
    write_atomically(folder / "fp8-phase.json", json.dumps({arm.name: runs for arm, runs in trainings.items()}) + "\n")
    print(tables(trainings))
    return 0


def write_corpus(folder: Path, vocab_size: int) -> Path:
    """Write token files of the standard library's sources and their tokenizer, unless they are there."""
    from megatron_fanformer.data.tokenizer import TOKENIZER_MODEL, train_sentencepiece
    from megatron_fanformer.demo.corpus import pack_standard_library
    from megatron_fanformer.prepare.documents import read_documents
    from megatron_fanformer.prepare.prepare import prepare
    from megatron_fanformer.prepare.verb import PrepareConfig

    corpus = pack_standard_library(folder / "documents")
    tokenizer = folder / TOKENIZER_MODEL
    if not tokenizer.exists():
        texts = (text for shard in corpus.train for text in read_documents(shard) if isinstance(text, str))
        train_sentencepiece(texts, tokenizer.with_suffix(""), vocab_size=vocab_size)
    for part, shards in {"train": corpus.train, VALIDATION: (corpus.held_out,)}.items():
        inputs = tuple(map(str, shards))
        prepare(PrepareConfig(inputs=inputs, output=str(folder / part), tokenizer=str(tokenizer), workers=1))
    return folder


def _trained(
    pool: RankPool, arm: Arm, seed: int, options: argparse.Namespace, corpus: Path, folder: Path
) -> dict[str, Any]:
    name = "-".join([*arm.name.lower().replace(",", "").split(), *([options.recipe] if arm.fp8 else []), str(seed)])
    file, run = folder / "results" / f"{name}.json", folder / "trainings" / name
    fp8 = {"fp8": "hybrid", "fp8_recipe": options.recipe, "fp8_fan": arm.fp8_fan} if arm.fp8 else {}
    shape = {name: getattr(options, name) for name in (*SHAPE, "vocab_size")}
    values = {
        "model": {**shape, "fan": {"placement": arm.placement}},
        "kernels": {"transformer_impl": arm.layers},
        "runtime": {"device": "cuda"},
        "precision": {"dtype": "bf16", **fp8},
        "data": {"train_data": [str(corpus / "train")], "valid_data": {VALIDATION: [str(corpus / VALIDATION)]}},
        "optimizer": {"lr": 3e-3, "adam_eps": 1e-8},
        "schedule": {"lr_warmup_iters": options.steps // 10},
        "training": {
            "run_dir": str(run),
            "train_iters": options.steps,
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "eval_iters": 40,
            "seed": seed,
        },
        "logging": {"tensorboard": False, "log_interval": max(1, options.steps // 4)},
    }
    if file.exists() and (before := json.loads(file.read_text())).pop("values") == values:
        return before
    shutil.rmtree(run, ignore_errors=True)
    print(name, flush=True)
    (trained,) = pool.run(1, train, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"values": values, **trained}) + "\n")
    return trained


def tables(trainings: dict[Arm, list[dict[str, Any]]]) -> str:
    """Return losses, differences of the same seed, and errors by the size of the phase, as Markdown."""
    rows = []
    for arm, several in trainings.items():
        losses = [(run["validation"], statistics.fmean(run["losses"][-LAST_STEPS:])) for run in several]
        cells = [arm.name, f"{statistics.fmean(loss for loss, _ in losses):.4f}", "", "", "", ""]
        if base := BASES[arm]:
            apart = [
                run["validation"] - other["validation"] for run, other in zip(several, trainings[base], strict=True)
            ]
            error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else math.nan
            cells[2:5] = [
                f"{statistics.fmean(apart):+.4f}",
                f"{error:.4f}",
                ", ".join(f"{value:+.4f}" for value in apart),
            ]
        cells[5] = f"{statistics.fmean(last for _, last in losses):.4f}"
        rows.append(cells)
    head = [
        "",
        "validation loss",
        "minus bf16",
        "± standard error",
        "by seed",
        f"training loss, last {LAST_STEPS} steps",
    ]
    parts = [markdown.table(head, rows, align="lrrrrr")]
    labels = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(EDGES)]
    for step, errors in trainings[FAN_BF16][0]["phases"].items():
        parts.append(f"Step {step}: p has an rms of {errors['rms']:.2f}")
        names = [f"{form}: {name}" for form in ("bf16", "fp8") for name in ("phase", "cos", "sin", "expected_phase")]
        pairs = zip(labels, errors["bf16"], errors["fp8"], strict=True)
        rows = [
            [label, f"{row['share']:.2%}", *(f"{r.get(n, math.nan):.4f}" for r in (row, other) for n in ERRORS)]
            for label, row, other in pairs
        ]
        parts.append(markdown.table(["|p|".replace("|", "\\|"), "share", *names], rows, align="lr" + "r" * len(names)))
    return "\n\n".join(parts)


ERRORS = ("phase", "cos", "sin", "expected_phase")

if __name__ == "__main__":
    sys.exit(main())
