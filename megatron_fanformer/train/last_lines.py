"""The last lines of `train`: what a complete run has made, and commands that work on it as they stand.

Decided from the run's folder alone, so that it holds for ranks that a launcher started, too.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.processes import seconds_since_start
from megatron_fanformer.train.loggers.progress_line import clock
from megatron_fanformer.train.loggers.registry import LOGGERS
from megatron_fanformer.train.metrics import VALIDATION_PREFIX, last_metrics
from megatron_fanformer.train.recovery import TOTALS

NEW_TOKENS = 64  # that `generate` adds to a prompt by default, if the model's context has room for them


def print_summary(run: Path) -> None:
    """Print them. Nothing keeps a run that is saved from ending well: what cannot be read is left out."""
    with suppress(FanformerError, OSError):
        for line in last_lines(run, seconds_since_start(os.getpid())):
            print(line, flush=True)


def last_lines(run: Path, seconds: float) -> list[str]:
    """Return six lines at most; none of a run that is yet to go on.

    Args:
        seconds: the time that this start of it took.

    Raises:
        InputError, CorruptError, OSError: the run's folder cannot be read.
    """
    checkpoint = run_folder.latest_checkpoint(run)
    if checkpoint is None:
        return []
    config = run_folder.saved_config(checkpoint)
    step, training = run_folder.step_of(checkpoint), config["training"]
    if step is None or step != training["train_iters"]:
        return []
    tokens = step * training["global_batch_size"] * config["model"]["seq_length"]
    metrics = last_metrics(run) or {}
    if metrics.get("step") != step:
        metrics = {}
    count = metrics.get(TOTALS["skipped"])
    skipped = f" ({count:,} of them skipped)" if count else ""
    losses = [f"{loss:.4f} ({name.removeprefix(VALIDATION_PREFIX)})" for name, loss in _validation(metrics)]
    validation = f"validation loss {', '.join(losses)}; " if losses else ""
    made = [f"{run_folder.CHECKPOINTS}/{checkpoint.name}", *(file for kind in LOGGERS.values() for file in kind.files)]
    return [
        f"complete: {step:,} of {step:,} steps{skipped}, {tokens:,} tokens; {validation}this start took"
        f" {clock(seconds)}",
        f"in {run}: {', '.join(name for name in made if (run / name).exists())}",
        "next:",
        *(f"  megatron-fanformer {shlex.join(words)}" for words in _next_commands(run, checkpoint, config)),
    ]


def _validation(metrics: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, loss) for name, loss in metrics.items() if name.startswith(VALIDATION_PREFIX)]


def _next_commands(run: Path, checkpoint: Path, config: dict[str, Any]) -> list[list[str]]:
    commands = [["inspect", str(run)]]
    length = config["model"]["seq_length"]
    if run_folder.attached_tokenizer(checkpoint) is not None:
        fewer = ["--max-new-tokens", str(length // 2)] if length < 2 * NEW_TOKENS else []
        is_chat = config["data"].get("format") == "sft"
        commands.append(["chat", str(run)] if is_chat else ["generate", str(run), "--prompt", "The", *fewer])
    whole = run if run.name else run.absolute()  # `.` has no name
    export = whole.with_name(f"{whole.name}-hf")
    if not export.exists():
        commands.append(["convert", str(run), str(export), "--to", "hf"])
    return commands
