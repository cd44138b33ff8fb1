"""The options of `evaluate`. Imports nothing that takes time: every command's parser reads it."""

import argparse
from pathlib import Path

BATCH_TOKENS = 8192  # of a micro batch: four of the paper's chunks; their logits are made chunk by chunk


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `evaluate` takes."""
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="a run's folder (its latest), its checkpoints/ folder (all of them) or a glob, one checkpoint, "
        "or an exported Hugging Face folder",
    )
    asked = parser.add_argument_group("what is measured")
    asked.add_argument("--tasks", nargs="+", default=(), metavar="TASK", help="tasks or groups (those of --requests)")
    asked.add_argument("--requests", type=Path, metavar="FILE", help="request file, as --prepare writes it")
    asked.add_argument("--limit", type=_count, metavar="N", help="the first N documents of each task (all)")
    asked.add_argument(
        "--perplexity",
        nargs="+",
        default=(),
        metavar="SET",
        help="NAME=PATH of token files (a prefix, .npy, a folder, a glob), or the groups v2-small and v3-small",
    )
    asked.add_argument("--perplexity-folder", metavar="FOLDER", help="where the sets of the groups are")
    asked.add_argument(
        "--chunking", choices=("tokens", "documents"), default="tokens", help="how sets are cut (tokens, as the paper)"
    )
    asked.add_argument("--chunk-tokens", type=_count, metavar="N", help="tokens of a chunk (the model's seq_length)")
    asked.add_argument("--batches", type=_count, metavar="N", help="the first N batches of each set (all)")
    asked.add_argument("--npy-dtype", choices=("uint16", "uint32"), default="uint16", help="of .npy files (uint16)")
    asked.add_argument("--eod-id", type=_id, metavar="ID", help="that ends a document in .npy files (the tokenizer's)")
    written = parser.add_argument_group("answers that a model writes (gsm8k, humaneval, mbpp, ULogic)")
    written.add_argument("--ulogic", type=Path, metavar="FILE", help="ULogic's rules, its probing_subset.json")
    written.add_argument("--run-code", action="store_true", help="allow running the programs that a model writes")
    written.add_argument("--num-samples", type=_count, default=1, metavar="N", help="answers to each document (1)")
    written.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (0)")
    written.add_argument("--top-k", type=_id, default=0, help="sample from the k most likely tokens; 0: all (0)")
    written.add_argument("--top-p", type=float, default=1.0, help="sample from tokens of this total probability (1)")
    written.add_argument("--max-new-tokens", type=_count, metavar="N", help="of an answer (the task's own)")
    run = parser.add_argument_group("how it runs")
    run.add_argument("--layout", default="", help='such as tp=2 or "pp=2,dp=2", on local ranks or torchrun\'s (one)')
    run.add_argument("--tokenizer", type=Path, help="instead of the checkpoint's own; with --prepare, the models'")
    run.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="what to run on (auto)")
    run.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: the saved; fp32 on a CPU")
    run.add_argument(
        "--batch-tokens",
        type=_count,
        default=BATCH_TOKENS,
        metavar="N",
        help=f"of a micro batch ({BATCH_TOKENS})",
    )
    told = parser.add_argument_group("what is told")
    told.add_argument(
        "--output", type=Path, metavar="FILE", help="write everything as JSON, as each checkpoint is done"
    )
    told.add_argument("--picture", type=Path, metavar="FILE", help="draw metrics over steps, as PNG")
    told.add_argument(
        "--compare",
        nargs=2,
        default=(),
        metavar=("A", "B"),
        help="results of --output, or checkpoints: the differences with 95%% intervals, by paired bootstrap",
    )
    told.add_argument("--seed", type=_id, default=0, help="of the bootstrap, and of what is sampled (0)")
    prepare = parser.add_argument_group("writing a request file")
    prepare.add_argument("--prepare", type=Path, metavar="FILE", help="write the requests of --tasks, and end")
    prepare.add_argument("--context-length", type=_count, metavar="N", help="with --prepare: longest request (2048)")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 2^31")
    return int(text)


def _id(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2^31")
    return int(text)
