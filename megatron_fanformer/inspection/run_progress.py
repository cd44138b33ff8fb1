"""How far a run has come, by the files in its folder: steps, losses, pace, events; of a run that goes on, too."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.run_lock import holder_of
from megatron_fanformer.checkpoint.store import metrics_entry
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.terminal import plural, some
from megatron_fanformer.training.loggers.progress_line import clock
from megatron_fanformer.training.loss_picture import SMOOTHED_SHARE
from megatron_fanformer.training.metrics import PERPLEXITY_LOSS_SUFFIX, VALIDATION_PREFIX, console_text
from megatron_fanformer.training.recovery import read_events

FEWEST_AVERAGED = 10  # steps, where there are so many; else a twentieth of them
LOOK_SECONDS = 2.0
"""Between looks at a run that is followed."""
EVENTS = {
    "computed_again": "computed again",
    "skipped": "skipped",
    "rewound": "gone back to",
    "earlier_checkpoint": "gone on from, where a newer checkpoint was damaged",
    "not_mirrored": "not copied to the mirror",
}
"""What is said of the steps of recovery.jsonl."""


@dataclass(kw_only=True)
class Progress:
    """A run's progress, as `--json` has it."""

    step: int = 0
    steps: int | None = None
    """The steps that it is to have; None where its configuration does not say."""
    saved: int = 0
    """The step that `train` goes on from; 0: from the beginning."""
    tokens: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    smoothed_loss: float | None = None
    """The mean over the last `window` losses."""
    window: int = 0
    validation: dict[str, dict[int, float]] = field(default_factory=dict)
    """The losses of validation and perplexity sets, by step."""
    tokens_per_second: float | None = None
    """The median of the last `window` steps, as is the next."""
    step_seconds: float | None = None
    running: str | None = None
    """Who holds the folder's lock; None where nobody does."""
    events: dict[str, list[int]] = field(default_factory=dict)
    """The steps of recovery.jsonl, by event."""
    profiles: int = 0

    @property
    def seconds_left(self) -> float | None:
        """Return what the other steps take at this pace, without evaluating and saving; None unless it runs."""
        if self.running is None or self.step_seconds is None or self.steps is None:
            return None
        return self.step_seconds * max(0, self.steps - self.step)

    def as_object(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "seconds_left": self.seconds_left}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield labels and texts; nothing of what is not known."""
        yield "steps", self._steps()
        if self.tokens is not None:
            yield "tokens", f"{self.tokens:,}"
        if self.first_loss is not None:
            mean = f", {self.smoothed_loss:.4f} over the last {plural(self.window, 'step')}" if self.window > 1 else ""
            yield "loss", f"{self.first_loss:.4f} first, {self.last_loss:.4f} last{mean}"
        for name, losses in self.validation.items():
            last, best = max(losses), min(losses, key=losses.__getitem__)
            lowest = "" if best == last else f", lowest {losses[best]:.4f} at step {best:,}"
            yield "validation", f"{name}: {losses[last]:.4f} at step {last:,}{lowest}"
        if self.tokens_per_second is not None and self.step_seconds is not None:
            over = f"medians of the last {plural(self.window, 'step')}" if self.window > 1 else "the last step"
            yield "speed", f"{self.tokens_per_second:,.0f} tokens/s, {self.step_seconds:.3g} s a step ({over})"
        if self.seconds_left is not None:
            yield "left", f"{clock(self.seconds_left)} at that pace, without evaluating and saving"
        for event, steps in self.events.items():
            yield "events", f"{plural(len(steps), 'step')} {EVENTS[event]}: {some(f'{step:,}' for step in steps)}"
        if self.profiles:
            yield "events", f"{plural(self.profiles, 'profile')}, in {store.TRACES}/"

    def _steps(self) -> str:
        of = "" if self.steps is None else f" of {self.steps:,}"
        if self.running is not None:
            return f"{self.step:,}{of}; {self.running}"
        if self.steps is None:
            return f"{self.step:,}; nothing runs"
        if self.saved >= self.steps:
            return f"{self.step:,}{of}, complete"
        start = f"step {self.saved:,}" if self.saved else "the beginning"
        return f"{self.step:,}{of}; nothing runs: train goes on from {start}"


def read_progress(run: Path) -> Progress:
    """Return how far a run has come, by what can be read of its folder."""
    saved, holder = _saved_step(run), holder_of(run)
    found = Progress(step=saved, steps=_planned(run), saved=saved)
    if holder is not None:
        found.running = f"runs on {holder.host} (process {holder.pid}) since {holder.since}"
    losses: list[float] = []
    speeds: list[tuple[float, float]] = []
    with suppress(FileNotFoundError), (run / store.METRICS).open("rb") as stream:  # one line in memory at a time
        for entry in (entry for line in stream if line.endswith(b"\n") and (entry := metrics_entry(line)) is not None):
            found.step = max(found.step, entry["step"])
            found.tokens = entry.get("tokens", found.tokens)
            losses += [entry["loss"]] if entry.get("loss") is not None else []
            if "tokens_per_second" in entry and "step_seconds" in entry:
                speeds.append((entry["tokens_per_second"], entry["step_seconds"]))
            for name, value in _evaluated(entry):
                found.validation.setdefault(name, {})[entry["step"]] = value
    if losses:
        found.window = min(len(losses), max(FEWEST_AVERAGED, len(losses) // SMOOTHED_SHARE))
        found.first_loss, found.last_loss = losses[0], losses[-1]
        found.smoothed_loss = statistics.fmean(losses[-found.window :])
    if speeds:
        of_tokens, of_steps = zip(*speeds[-max(1, found.window) :], strict=True)
        found.tokens_per_second, found.step_seconds = statistics.median(of_tokens), statistics.median(of_steps)
    for event in read_events(run):
        steps = found.events.setdefault(event["event"], [])
        if event["step"] not in steps:  # a run that went back skips a step again
            steps.append(event["step"])
    found.profiles = len([*(run / store.TRACES).glob("step-*")])
    return found


def _planned(run: Path) -> int | None:
    with suppress(CorruptError):
        steps: int | None = store.read_mapping(run / store.CONFIG).get("training", {}).get("train_iters")
        return steps
    return None


def _saved_step(run: Path) -> int:
    """Return the step of the checkpoint that a run goes on from, as far as its small files tell; 0 where there is none.

    A step may be logged and never saved, as those since the last checkpoint of a run that was killed.
    """
    with suppress(CorruptError):  # `latest` names one, and there is none at all
        for checkpoint in store.checkpoints_to_resume(run):
            with suppress(CorruptError):
                store.check_sound(checkpoint)
                return store.step_of(checkpoint) or 0
    return 0


def _evaluated(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the losses that a step has evaluated, by the names of their sets."""
    for name, value in entry.items():
        if name.startswith(VALIDATION_PREFIX) and value is not None:
            yield name.removeprefix(VALIDATION_PREFIX), value
        elif name.startswith("eval/") and name.endswith(PERPLEXITY_LOSS_SUFFIX) and value is not None:
            yield name.removeprefix("eval/").removesuffix(PERPLEXITY_LOSS_SUFFIX), value


# -- a run that goes on


def follow(run: Path, *, wait: Callable[[], None] = lambda: time.sleep(LOOK_SECONDS)) -> Iterator[str]:
    """Yield lines while a run goes on: its newest step at each look, evaluations, checkpoints; how it was left.

    Args:
        wait: called between looks.

    Raises:
        InputError: nothing runs in the folder.
    """
    if holder_of(run) is None:
        raise InputError(f"nothing runs in {run}, so that --follow has nothing to wait for; leave it out")
    metrics = run / store.METRICS
    place = metrics.stat().st_size if metrics.is_file() else 0
    known = {checkpoint.name for checkpoint in store.complete_checkpoints(run)}
    steps = _planned(run)
    is_running = True
    while is_running:
        wait()
        is_running = holder_of(run) is not None  # before the last look, which then sees all
        entries, place = _new_entries(metrics, place)
        if entries:
            yield _step_line(entries, steps)
        for entry in entries:
            for name, loss in _evaluated(entry):
                yield f"step {entry['step']}  validation loss ({name}) {loss:.4f}"
        for checkpoint in store.complete_checkpoints(run):
            if checkpoint.name not in known:
                known.add(checkpoint.name)
                yield f"saved {checkpoint}"
    yield next(f"the run has ended: {text}" for label, text in read_progress(run).rows() if label == "steps")


def _new_entries(metrics: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """Return the steps of the whole lines from a place in the file on, and the place of what comes after them.

    A file that ends before that place is another, of a run that took steps back and logs them again from its end on.
    """
    with suppress(FileNotFoundError), metrics.open("rb") as stream:
        stream.seek(place)
        if not (content := stream.read()):
            return [], metrics.stat().st_size
        whole = content[: content.rfind(b"\n") + 1]
        entries = [entry for line in whole.splitlines() if (entry := metrics_entry(line)) is not None]
        return entries, place + len(whole)
    return [], 0


def _step_line(entries: list[dict[str, Any]], steps: int | None) -> str:
    """Return the newest step as `train` prints it, with what is left at the pace of all new ones."""
    step = entries[-1]["step"]
    status = console_text({name: value for name, value in entries[-1].items() if value is not None}) or "skipped"
    if steps is None:
        return f"step {step}  {status}"
    paces = [entry["step_seconds"] for entry in entries if "step_seconds" in entry]
    left = f"  left {clock(statistics.median(paces) * max(0, steps - step))}" if paces else ""
    return f"step {step}/{steps}  {status}{left}"
