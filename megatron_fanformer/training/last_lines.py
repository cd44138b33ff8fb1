"""The last lines of `train`: what a complete run has made, and commands that work on it as they stand.

Decided from the run's folder alone, so that it holds for ranks that a launcher started, too.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.data.chat_template import find_template, refuse_spaces_between
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.errors import FanformerError, collect_problems
from megatron_fanformer.processes import seconds_since_start
from megatron_fanformer.training.loggers.progress_line import clock
from megatron_fanformer.training.loggers.registry import LOGGERS
from megatron_fanformer.training.metrics import VALIDATION_PREFIX, last_metrics
from megatron_fanformer.training.recovery import TOTALS

COMMAND = "  megatron-fanformer "  # what the line of one begins with
PROMPT = "The"
NEW_TOKENS = 64  # that `generate` adds to a prompt by default, if the model's context has room for them
SKIPPED_STEPS = TOTALS["skipped"]


def print_summary(run: Path) -> None:
    """Print them. Nothing keeps a run that is saved from ending well: what cannot be read is left out."""
    with suppress(FanformerError, OSError):
        for line in last_lines(run, seconds_since_start(os.getpid())):
            print(line, flush=True)


def last_lines(run: Path, seconds: float) -> list[str]:
    """Six lines at most; none of a run that is yet to go on.

    Args:
        seconds: what this start of it took.

    Raises:
        InputError, CorruptError, OSError: the run's folder cannot be read.
    """
    checkpoint = store.latest_checkpoint(run)
    if checkpoint is None:
        return []
    config = store.saved_config(checkpoint)
    step, training = store.step_of(checkpoint), config["training"]
    if step is None or step != training["train_iters"]:
        return []
    tokens = step * training["global_batch_size"] * config["model"]["seq_length"]
    metrics = last_metrics(run)
    if metrics is None or metrics["step"] != step:
        metrics = {}
    skipped = f" ({metrics[SKIPPED_STEPS]:,} of them skipped)" if metrics.get(SKIPPED_STEPS) else ""
    made = [f"{store.CHECKPOINTS}/{checkpoint.name}", *(file for kind in LOGGERS.values() for file in kind.files)]
    return [
        f"complete: {step:,} of {step:,} steps{skipped}, {tokens:,} tokens; {_losses(metrics)}this start took"
        f" {clock(seconds)}",
        f"in {run}: {', '.join(name for name in made if (run / name).exists())}",
        "next:",
        *(f"{COMMAND}{shlex.join(words)}" for words in _next_commands(run, checkpoint, config)),
    ]


def _losses(metrics: dict[str, Any]) -> str:
    losses = {name: loss for name, loss in metrics.items() if name.startswith(VALIDATION_PREFIX)}
    listed = ", ".join(f"{loss:.4f} ({name.removeprefix(VALIDATION_PREFIX)})" for name, loss in losses.items())
    return f"validation loss {listed}; " if listed else ""


def _next_commands(run: Path, checkpoint: Path, config: dict[str, Any]) -> list[list[str]]:
    """Return those that this run's folder has all for."""
    commands = [["inspect", str(run)]]
    file = store.attached_tokenizer(checkpoint)
    tokenizer = None if file is None else collect_problems([], lambda: load_tokenizer(file))
    if tokenizer is not None:
        room = config["model"]["seq_length"] - len(tokenizer.encode(PROMPT))
        if config["data"].get("format") == "sft" and _can_chat(tokenizer):
            commands.append(["chat", str(run)])
        elif room > 0:
            fewer = ["--max-new-tokens", str(room)] if room < NEW_TOKENS else []
            commands.append(["generate", str(run), "--prompt", PROMPT, *fewer])
    whole = run if run.name else run.absolute()  # `.` has no name
    export = whole.with_name(f"{whole.name}-hf")
    if (tokenizer is not None or file is None) and not export.exists():
        commands.append(["convert", str(run), str(export), "--to", "hf"])
    return commands


def _can_chat(tokenizer: Tokenizer) -> bool:
    problems: list[str] = []
    collect_problems(problems, lambda: find_template(tokenizer.path))
    collect_problems(problems, lambda: refuse_spaces_between(tokenizer))
    return not problems
