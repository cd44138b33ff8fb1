"""Recovery from steps whose numbers are bad: which steps are bad, what follows, and the record of it.

    good                     the weights are updated
    bad, good when repeated  a machine was at fault: the weights are updated by the second attempt
    bad                      the step's samples are skipped, the weights stay
    several bad in a row     the run goes back to the last checkpoint before them, and skips them from then on

Every rank comes to the same decision, because all ranks judge equal numbers (see `step.gradient_norm`).
The trainer carries the decision out. Events are appended to `recovery.jsonl` in the run's folder; a resumed run reads
there which steps to skip.
"""

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_fanformer.checkpoint.run_folder import RECOVERY, metrics_entry
from megatron_fanformer.durable_files import naming, regular_file
from megatron_fanformer.errors import broken_fields

Event = Literal["earlier_checkpoint", "computed_again", "skipped", "rewound"]
TOTALS: dict[str, str] = {
    "earlier_checkpoint": "recovery/damaged_checkpoints",
    "computed_again": "recovery/recomputed_steps",
    "skipped": "recovery/skipped_steps",
    "rewound": "recovery/rewinds",
}
"""For each event, the metric that counts it from the start of the run."""

BEGAN = "began"
"""The event that marks a new run from step 0, in a folder that has events of an earlier run."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Recovery from damage, and from steps whose numbers are bad."""

    use_earlier_checkpoint: bool = True
    """If the newest checkpoint is damaged, resume from the newest sound one; false: end (exit code 3)."""
    check_for_nan_in_loss_and_grad: bool = True
    """A step is bad if its loss or gradient norm is not finite."""
    check_for_spiky_loss: bool = False
    """A step is also bad if its loss or gradient norm is a spike."""
    spiky_loss_factor: float = 2.0
    """A spike is a loss above this many times its running median."""
    spiky_grad_norm_factor: float = 10.0
    """A spike is a gradient norm above this many times its running median."""
    spike_window: int = 100
    """Good steps that the medians are taken over; before a tenth of them, no step is a spike."""
    compute_again: bool = True
    """Compute a bad step again; if it is good then, take it."""
    max_bad_steps_in_a_row: int = 3
    """After so many bad steps, go back to the last checkpoint before them and skip them; 0: the first ends the run
    (exit code 4)."""
    max_rewinds: int = 2
    """How often a run may go back without progress before it ends (exit code 4)."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps whose samples are skipped."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        broken = partial(broken_fields, "recovery", self)
        return [
            *broken("be above 1", lambda value: value <= 1, "spiky_loss_factor", "spiky_grad_norm_factor"),
            *broken("not be negative", lambda value: value < 0, "max_bad_steps_in_a_row", "max_rewinds"),
            *broken("be at least 10", lambda value: value < 10, "spike_window"),
        ]


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events recorded after the last mark `BEGAN`, oldest first; ignore unreadable lines, a missing file."""
    try:
        lines = regular_file(run / RECOVERY).read_bytes().splitlines()
    except OSError:
        return
    events = [event for event in map(metrics_entry, lines) if event is not None]
    first = max((number for number, event in enumerate(events, 1) if event.get("event") == BEGAN), default=0)
    yield from (event for event in events[first:] if event.get("event") in TOTALS)


class EventLog:
    """Counts the events of a run on every rank, and writes them to `recovery.jsonl` on rank 0.

    Args:
        past_events: the events of the run before this process started, the same on all ranks.
        is_writer: whether this is rank 0.
    """

    def __init__(self, run: Path, past_events: list[dict[str, Any]], *, is_writer: bool) -> None:
        self._path, self._is_writer = run / RECOVERY, is_writer
        self._steps: dict[str, list[int]] = {}
        for event in past_events:
            self._steps.setdefault(event["event"], []).append(event["step"])

    def mark_new_run(self) -> None:
        """Record that a run begins at step 0; events before this mark belong to an earlier run in the same folder."""
        if self._is_writer and self._path.exists():
            self._append(BEGAN, 0)

    def add(self, event: Event, step: int, **details: Any) -> None:
        """Count an event and record it with details, which are plain values."""
        self._steps.setdefault(event, []).append(step)
        if self._is_writer:
            self._append(event, step, **details)

    def _append(self, event: str, step: int, **details: Any) -> None:
        line = json.dumps({"step": step, "event": event, "time": round(time.time(), 3), **details})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self._path), self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_cut_off = size > 0 and file.read() != b"\n"  # a crash or a full disk ended the last line early
            file.write(b"\n" * is_cut_off + line.encode() + b"\n")

    def totals(self) -> dict[str, int]:
        """Return the metrics that count the events so far; a step that was skipped more than once counts once."""
        return {TOTALS[event]: len(set(steps) if event == "skipped" else steps) for event, steps in self._steps.items()}


class BadSteps:
    """Decides which steps are bad, and which to skip.

    Args:
        past_events: the events of the run before this process started.
    """

    def __init__(self, config: RecoveryConfig, past_events: list[dict[str, Any]]) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self._to_skip = dict.fromkeys(config.iterations_to_skip, "named in recovery.iterations_to_skip")
        for event in past_events:
            if event["event"] == "rewound":
                self.skip_from_now_on(event.get("skipped", {}))
        self.in_a_row: dict[int, str] = {}
        """The bad steps since the last good one, and the fault of each."""
        self._rewinds = 0  # since the last checkpoint that was saved with progress (see `note_saved`)
        self._last_bad, self._last_good = 0, 0

    def reason_to_skip(self, step: int) -> str | None:
        """Return the reason to skip a step; None if it is to be computed."""
        return self._to_skip.get(step)

    def skip_from_now_on(self, steps: dict[Any, Any]) -> None:
        """Skip steps from now on; the argument maps each step to the reason."""
        self._to_skip.update({int(step): str(reason) for step, reason in steps.items()})

    def fault_in(self, loss: float, grad_norm: float) -> str | None:
        """Return the fault in a step's numbers; None if there is none."""
        numbers = (
            ("loss", loss, self._losses, self._config.spiky_loss_factor),
            ("gradient norm", grad_norm, self._norms, self._config.spiky_grad_norm_factor),
        )
        for name, value, _, _ in numbers:
            if self._config.check_for_nan_in_loss_and_grad and not math.isfinite(value):
                return f"the {name} is {value}"
        if self._config.check_for_spiky_loss and len(self._losses) >= self._config.spike_window // 10:
            for name, value, window, factor in numbers:
                if value > factor * (median := statistics.median(window)):
                    return f"the {name} is {value:.4g}, more than {factor:g} times its median of {median:.4g}"
        return None

    def note_good(self, step: int, loss: float, grad_norm: float) -> None:
        """Note that a good step has updated the weights."""
        self.in_a_row.clear()
        self._last_good = step
        if self._config.check_for_spiky_loss:
            self._losses.append(loss)
            self._norms.append(grad_norm)

    def note_bad(self, step: int, fault: str) -> None:
        """Note that a step was skipped because of a fault in its numbers."""
        self.in_a_row[step] = fault
        self._last_bad = max(self._last_bad, step)

    @property
    def limit_reached(self) -> bool:
        """True if so many steps in a row were bad that the run must go back, or end."""
        return len(self.in_a_row) >= max(1, self._config.max_bad_steps_in_a_row)  # 0: the first bad step ends the run

    @property
    def rewind_refusal(self) -> str | None:
        """The reason why the run may not go back again; None if it may."""
        if self._config.max_bad_steps_in_a_row == 0:
            return "recovery.max_bad_steps_in_a_row is 0"
        return None if self._rewinds < self._config.max_rewinds else "recovery.max_rewinds is reached"

    def note_rewind(self) -> dict[int, str]:
        """Note that the run goes back; return the bad steps, which it will skip from now on, and their faults."""
        skipped = dict(self.in_a_row)
        self._rewinds += 1
        self.skip_from_now_on(skipped)
        self.in_a_row.clear()
        return skipped

    def note_saved(self) -> None:
        """Note that a checkpoint was saved; if a step after the bad ones was good, count rewinds from 0 again.

        Without a good step after them, the run has only skipped the bad steps again. If the count began again then, a
        run that has no more good steps would go back for ever.
        """
        if self._last_good > self._last_bad:
            self._rewinds = 0

    def medians(self) -> dict[str, list[float]]:
        """Return the values that the running medians are taken over, to save them; empty without spike checks."""
        return {"losses": list(self._losses), "grad_norms": list(self._norms)} if self._losses else {}

    def set_medians(self, saved: dict[str, list[float]]) -> None:
        """Restore the values that `medians` returned when a checkpoint was saved."""
        for window, name in ((self._losses, "losses"), (self._norms, "grad_norms")):
            window.clear()
            window.extend(saved.get(name, ()))
