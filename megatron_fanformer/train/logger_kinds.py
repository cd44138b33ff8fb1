"""The loggers of a run: metrics.jsonl, the progress on the terminal, TensorBoard, Weights & Biases."""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import yaml

from megatron_fanformer.checkpoint.run_folder import METRICS, metrics_entry
from megatron_fanformer.durable_files import naming, regular_file, write_atomically
from megatron_fanformer.train.metrics import console_text, dashboard_name, numbers

if TYPE_CHECKING:
    from rich.console import Console

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
RUN_ID = f"{WANDB_FOLDER}/run-id"
WANDB_SECONDS = 60  # a run's longest wait for its server, at its start and end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The point from which a run logs: its start, or the checkpoint that it resumes from or goes back to."""

    run: Path
    """The run's folder."""
    step: int
    """The last step whose earlier log is kept."""
    steps: int
    """Number of steps of the whole run."""
    values: dict[str, Any]
    """The resolved configuration."""
    logging: Any
    """The section `logging`."""
    console: "Console"


class Logger(ABC):
    """Something that records metrics; it is opened as it is made, and made anew after the run went back.

    A new one is a file with a class like this, its entry in `LOGGERS`, and a field that turns it on.
    """

    setting: ClassVar[str | None] = None
    """The field of the section `logging` that turns it on, unless that is null or false; None: it is always on."""
    package: ClassVar[str | None] = None
    """The package that it needs, which is also the name of the extra that brings it."""
    is_needed: ClassVar[bool] = False
    """True: the run ends if it fails; else it is left out from then on."""
    files: ClassVar[tuple[str, ...]] = ()
    """Its files in the run's folder."""

    @abstractmethod
    def __init__(self, start: Start) -> None:
        """Open it; remove its records of steps after `start.step`, or skip those steps."""

    @abstractmethod
    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step: numbers, texts, and lists of a number a layer."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Flush and close; `failed`: the run ends with an error."""

    @classmethod
    def is_on(cls, config: Any) -> bool:
        """Return whether the section `logging` asks for it."""
        return cls.setting is None or getattr(config, cls.setting) not in (None, False)


class JSONLines(Logger):
    """Appends one object per step to metrics.jsonl."""

    is_needed = True
    files = (METRICS,)

    def __init__(self, start: Start) -> None:
        self._path = start.run / METRICS
        if self._path.exists():
            # A crash in the middle of a write leaves a line without its end.
            entries = [(line, metrics_entry(line)) for line in self._path.read_bytes().split(b"\n")[:-1]]
            kept = [line + b"\n" for line, entry in entries if entry is not None and entry["step"] <= start.step]
            write_atomically(self._path, b"".join(kept))
        self._file = self._path.open("a")

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        with naming(self._path):
            self._file.write(msgspec.json.encode({"step": step, **metrics}).decode() + "\n")  # NaN as null
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with suppress(OSError) if failed else naming(self._path):  # what failed before says more
            self._file.close()


def clock(seconds: float) -> str:
    """Return a time of seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class ProgressLine(Logger):
    """Shows a live line on a terminal; elsewhere prints a line every `log_interval` steps."""

    is_needed = True

    def __init__(self, start: Start) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console, self._interval, self._total = start.console, start.logging.log_interval, start.steps
        self._started, self._first = time.monotonic(), start.step
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=start.steps, completed=start.step, status="")
        self._bar.start()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step, by its metrics."""
        status = console_text(metrics) or "skipped"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            left = (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
            line = f"step {step}/{self._total}  {status}  left {clock(left)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """End the live line."""
        self._bar.stop()


class TensorBoard(Logger):
    """Writes event files: the metrics in groups, and the configuration of each start."""

    setting = "tensorboard"
    files = (TENSORBOARD_FOLDER,)

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(start.run / TENSORBOARD_FOLDER), purge_step=start.step + 1)
        configuration = f"```yaml\n{yaml.safe_dump(start.values, sort_keys=False)}```"
        self._writer.add_text("configuration", configuration, start.step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(dashboard_name(name), value, step)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files."""
        self._writer.close()


class WeightsAndBiases(Logger):
    """Keeps one W&B run for the whole run, however often that is resumed: its id is kept in the run's folder.

    W&B removes nothing: the steps that its server has already are left out.
    """

    setting = "wandb_project"
    package = "wandb"
    files = (WANDB_FOLDER,)

    def __init__(self, start: Start) -> None:
        import wandb

        config = start.logging
        file = start.run / RUN_ID
        file.parent.mkdir(exist_ok=True)
        run_id = regular_file(file).read_text().strip() if file.exists() else uuid.uuid4().hex
        # For the whole process, so that without a key it fails, and asks for none: the other ranks would wait.
        wandb.setup(wandb.Settings(silent=True))
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            id=run_id,
            resume="allow",
            dir=str(start.run),
            config=start.values,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS
            ),
        )
        write_atomically(file, self._run.id)
        # Rows cannot be taken back: what W&B's server has already stays.
        self._last_step = max(start.step, self._run.step - 1)
        if self._run.url:
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        if step > self._last_step:
            row = {dashboard_name(name): value for name, value in numbers(metrics).items()}
            self._run.log(row, step=step, commit=True)

    def close(self, *, failed: bool = False) -> None:
        """Send the rest, and end."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for W&B's own process, which writes the last rows after `finish`
