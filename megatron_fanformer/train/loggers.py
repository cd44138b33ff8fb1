"""The section `logging` of a run's configuration, and its loggers: metrics.jsonl, progress, TensorBoard, W&B.

A resumed run removes the records of steps after its checkpoint, so that each step appears once.
"""

import importlib.util
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import yaml

from megatron_fanformer.checkpoint.run_folder import CONFIG, METRICS, metrics_entry
from megatron_fanformer.durable_files import naming, regular_file, write_atomically
from megatron_fanformer.errors import InputError, broken_fields
from megatron_fanformer.train.metrics import console_text, dashboard_name, numbers

if TYPE_CHECKING:
    from rich.console import Console

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
RUN_ID = f"{WANDB_FOLDER}/run-id"
WANDB_SECONDS = 60  # a run's longest wait for its server, at its start and end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The loggers, and the intervals of measurements."""

    log_interval: int = 10
    """Steps between printed lines if the output is not a terminal."""
    tensorboard: bool = True
    """Write TensorBoard's event files."""
    wandb_project: str | None = None
    """Project of Weights & Biases (the extra `wandb`); null: none."""
    wandb_entity: str | None = None
    """Team or user there; null: the account's own."""
    wandb_exp_name: str | None = None
    """Name of the run there; null: W&B chooses."""
    norm_interval: int | None = 100
    """Steps between norms of weights, peak memory, tokens of each source, and the slowest rank; null: none."""
    phase_interval: int | None = 1000
    """Steps between measurements of the FAN map's phases (docs/metrics.md#phase-health), which CUDA graphs turn off;
    null: none."""
    folder: str | None = None
    """Folder for a log file of each rank (`rank-00000.log` and so on); null: none."""
    profile_steps: list[int] | None = None
    """The first and the last step to profile, into the run's folder (docs/debugging.md#where-the-time-goes)."""
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])
    """Ranks that are profiled; null: all."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        return [
            *broken_fields("logging", self, "be at least 1", lambda value: value < 1, "log_interval"),
            *broken_fields(
                "logging", self, "be at least 1, or null", lambda value: value < 1, "norm_interval", "phase_interval"
            ),
            *broken_fields(
                "logging",
                self,
                "be [FIRST, LAST] with 1 <= FIRST <= LAST",
                lambda steps: len(steps) != 2 or not 1 <= steps[0] <= steps[1],
                "profile_steps",
            ),
        ]


def logger_problems(config: LoggingConfig) -> list[str]:
    """Return a line where W&B is to be a logger, and this machine lacks it."""
    package = importlib.util.find_spec("wandb")
    if config.wandb_project is None or (package and package.origin):  # a folder of that name, as W&B makes, has none
        return []
    return [
        "logging.wandb_project is set, but wandb is not installed; install megatron_fanformer[wandb], or turn it off"
    ]


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
    is_needed: ClassVar[bool] = False
    """True: the run ends if it fails; else it is left out from then on."""

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
        """Show the number and the metrics of a finished step."""
        status = console_text(metrics) or "skipped"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            seconds_per_step = (time.monotonic() - self._started) / max(1, step - self._first)
            seconds_left = seconds_per_step * (self._total - step)
            line = f"step {step}/{self._total}  {status}  left {clock(seconds_left)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """End the live line."""
        self._bar.stop()


class TensorBoard(Logger):
    """Writes event files: the metrics in groups, and the configuration of each start."""

    setting = "tensorboard"

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


LOGGERS: dict[str, type[Logger]] = {
    METRICS: JSONLines,
    "progress": ProgressLine,
    "TensorBoard": TensorBoard,
    "Weights & Biases": WeightsAndBiases,
}
"""The loggers by their names in messages and pages. They are closed in this order: what may wait for a server, and be
ended meanwhile, comes last."""


class Loggers:
    """All loggers of a run; every rank has one, and those of rank 0 write.

    A logger that `is_needed` ends the run if it fails. Any other is left out from then on, with a warning: a network
    that is gone is no reason to stop training.

    Args:
        run: the run's folder.
        steps: of the whole run.
    """

    def __init__(self, config: LoggingConfig, console: "Console", *, run: Path, steps: int, writes: bool) -> None:
        self._config, self._console, self._writes = config, console, writes
        self._run, self._steps = run, steps
        self._open: dict[str, Logger] = {}
        self._failed: set[str] = set()

    def open(self, values: dict[str, Any], *, step: int, beside: Mapping[str, str] | None = None) -> None:
        """Begin, or begin anew after the run went back, with the resolved configuration.

        Args:
            step: the last step that the run has taken; records of later ones are removed.
            beside: texts that the run's folder holds beside the configuration, by their names.

        Raises:
            InputError: the run's folder cannot be written.
        """
        self.close()
        if not self._writes:
            return
        start = Start(
            run=self._run,
            step=step,
            steps=self._steps,
            values=values,
            logging=self._config,
            console=self._console,
        )
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            for name, text in {CONFIG: yaml.safe_dump(values, sort_keys=False), **(beside or {})}.items():
                write_atomically(self._run / name, text)
            for name, kind in LOGGERS.items():
                if kind.is_on(self._config) and name not in self._failed:
                    with self._left_out_if_it_fails(name, kind):
                        self._open[name] = kind(start)
        except OSError as error:
            reason = f"cannot be written ({error.strerror or error}); free space, or name another"
            raise InputError(f"training.run_dir {self._run} {reason}") from error

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a step's metrics everywhere."""
        for name, opened in list(self._open.items()):
            with self._left_out_if_it_fails(name, type(opened)):
                opened.write(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers; they can be opened again.

        Args:
            failed: whether the run ends with an error.
        """
        for name, opened in list(self._open.items()):  # in the table's order: one that waits for a server is last
            del self._open[name]
            with self._left_out_if_it_fails(name, type(opened)):
                opened.close(failed=failed)

    @contextmanager
    def _left_out_if_it_fails(self, name: str, kind: type[Logger]) -> Iterator[None]:
        """Warn where a logger fails, and never open it again: it would have a hole, and may fail again."""
        try:
            yield
        except Exception as error:  # whatever a library or a network raises
            if kind.is_needed:
                raise
            self._failed.add(name)
            logger.warning("%s is without this run's metrics from here on: %s: %s", name, type(error).__name__, error)
            if opened := self._open.pop(name, None):
                with suppress(Exception):  # one failure is reported
                    opened.close(failed=True)
