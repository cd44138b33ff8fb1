"""How far a run has come, by the files in its folder: steps, losses, pace, events."""

import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_folder import metrics_entry
from megatron_fanformer.checkpoint.run_lock import holder_of
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX, SMOOTHED_SHARE, VALIDATION_PREFIX
from megatron_fanformer.train.recovery import read_events

FEWEST_AVERAGED = 10  # steps, where there are so many; else a twentieth of them


def read_progress(run: Path) -> dict[str, Any]:
    """Return how far a run has come, by what can be read of its folder.

    `saved` is the step that `train` goes on from (0: the beginning); `smoothed_loss`, `tokens_per_second` and
    `step_seconds` are the mean and the medians of the last `window` steps; `seconds_left` is at that pace, without
    evaluating and saving, and None unless the run goes on; `events` are those of recovery.jsonl, with their steps.
    """
    holder, saved, steps = holder_of(run), _saved_step(run), _planned(run)
    losses: list[float] = []
    speeds: list[tuple[float, float]] = []
    validation: dict[str, dict[int, float]] = {}
    step, tokens = saved, None
    with suppress(FileNotFoundError), (run / run_folder.METRICS).open("rb") as stream:  # one line in memory at a time
        for entry in (entry for line in stream if line.endswith(b"\n") and (entry := metrics_entry(line)) is not None):
            step, tokens = max(step, entry["step"]), entry.get("tokens", tokens)
            losses += [entry["loss"]] if entry.get("loss") is not None else []
            if "tokens_per_second" in entry and "step_seconds" in entry:
                speeds.append((entry["tokens_per_second"], entry["step_seconds"]))
            for name, value in _evaluated(entry):
                validation.setdefault(name, {})[entry["step"]] = value
    window = min(len(losses), max(FEWEST_AVERAGED, len(losses) // SMOOTHED_SHARE))
    tokens_per_second, step_seconds = (
        map(statistics.median, zip(*speeds[-max(1, window) :], strict=True)) if speeds else (None, None)
    )
    events: dict[str, list[int]] = {}
    for event in read_events(run):
        of_kind = events.setdefault(event["event"], [])
        if event["step"] not in of_kind:  # a run that went back skips a step again
            of_kind.append(event["step"])
    is_running = holder is not None
    if holder is not None:
        state = f"runs on {holder.host} (process {holder.pid}) since {holder.since}"
    elif steps is None or saved >= steps:
        state = "complete" if steps is not None else "nothing runs"
    else:
        state = f"nothing runs: train goes on from {f'step {saved:,}' if saved else 'the beginning'}"
    return {
        "step": step,
        "steps": steps,
        "state": state,
        "saved": saved,
        "tokens": tokens,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "smoothed_loss": statistics.fmean(losses[-window:]) if losses else None,
        "window": window,
        "validation": validation,
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "seconds_left": step_seconds * max(0, steps - step) if is_running and step_seconds and steps else None,
        "running": state if is_running else None,
        "events": events,
        "profiles": len([*(run / run_folder.TRACES).glob("step-*")]),
    }


def _planned(run: Path) -> int | None:
    with suppress(CorruptError):
        steps: int | None = run_folder.read_mapping(run / run_folder.CONFIG).get("training", {}).get("train_iters")
        return steps
    return None


def _saved_step(run: Path) -> int:
    """Return the step of the checkpoint that a run goes on from, as far as its small files tell; 0 where there is none.

    A step may be logged and never saved, as those since the last checkpoint of a run that was killed.
    """
    with suppress(CorruptError):  # `latest` names one, and there is none at all
        for checkpoint in run_folder.checkpoints_to_resume(run):
            with suppress(CorruptError):
                run_folder.check_sound(checkpoint)
                return run_folder.step_of(checkpoint) or 0
    return 0


def _evaluated(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the losses that a step has evaluated, by the names of their sets."""
    for name, value in entry.items():
        if name.startswith(VALIDATION_PREFIX) and value is not None:
            yield name.removeprefix(VALIDATION_PREFIX), value
        elif name.startswith("eval/") and name.endswith(PERPLEXITY_LOSS_SUFFIX) and value is not None:
            yield name.removeprefix("eval/").removesuffix(PERPLEXITY_LOSS_SUFFIX), value
