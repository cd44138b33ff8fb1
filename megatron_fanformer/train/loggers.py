"""The section `logging` of a run's configuration, and its loggers: metrics.jsonl, progress, TensorBoard, W&B.

A resumed run removes the records of steps after its checkpoint, so each step is recorded once.
"""

import importlib.util
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import yaml

from megatron_fanformer.checkpoint.run_folder import CONFIG, METRICS, metrics_entry
from megatron_fanformer.durable_files import naming, regular_file, write_atomically
from megatron_fanformer.errors import InputError, broken_fields
from megatron_fanformer.train.metrics import dashboard_name, scalar_metrics

if TYPE_CHECKING:
    from rich.console import Console

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
RUN_ID = f"{WANDB_FOLDER}/run-id"
PROGRESS_FORMATS = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
"""The metrics on the progress line, and how they are shown."""
WANDB_SECONDS = 60  # the longest wait for W&B's server, at the start and at the end of a run

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
    """Steps between measurements of FAN phases (docs/metrics.md#phase-health); null, or with CUDA graphs: none."""
    folder: str | None = None
    """Folder for a log file of each rank (`rank-00000.log` and so on); null: none."""
    profile_steps: list[int] | None = None
    """The first and the last step to profile, into the run's folder (docs/debugging.md#where-the-time-goes)."""
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])
    """Ranks that are profiled; null: all."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        broken = partial(broken_fields, "logging", self)
        return [
            *broken("be at least 1", lambda value: value < 1, "log_interval"),
            *broken("be at least 1, or null", lambda value: value < 1, "norm_interval", "phase_interval"),
            *broken(
                "be [FIRST, LAST] with 1 <= FIRST <= LAST",
                lambda steps: len(steps) != 2 or not 1 <= steps[0] <= steps[1],
                "profile_steps",
            ),
        ]


def logger_problems(config: LoggingConfig) -> list[str]:
    """Return one line if `wandb_project` is set and wandb is not installed here."""
    package = importlib.util.find_spec("wandb")
    # A folder `wandb`, which W&B makes where it runs, is found too, but has no origin.
    if config.wandb_project is None or (package and package.origin):
        return []
    return [
        "logging.wandb_project is set, but wandb is not installed; install megatron_fanformer[wandb], or turn it off"
    ]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The arguments of every logger: where a run logs, and the step after which it starts or continues."""

    run: Path
    """The run's folder."""
    step: int
    """Records of later steps are removed."""
    steps: int
    """Number of steps of the whole run."""
    values: dict[str, Any]
    """The resolved configuration."""
    logging: Any
    """The section `logging`."""
    console: "Console"


class Logger(ABC):
    """Base class of loggers. Creating a logger opens it; when the run goes back, it is closed and created again.

    To add a logger, write a subclass, enter it in `LOGGERS`, and add a configuration field that turns it on.
    """

    setting: ClassVar[str | None] = None
    """The field of the section `logging` that turns the logger on, by a value other than null and false; None: the
    logger is always on."""
    is_needed: ClassVar[bool] = False
    """True: a failure of the logger ends the run; False: a failed logger is dropped, and the run continues."""

    @abstractmethod
    def __init__(self, start: Start) -> None:
        """Open the log and remove its records of steps after `start.step`, or let `write` ignore those steps."""

    @abstractmethod
    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step: numbers, texts, and lists with one number per layer."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Flush and close the log; `failed` is True if the run ends with an error."""

    @classmethod
    def is_on(cls, config: Any) -> bool:
        """Return whether the section `logging` turns this logger on."""
        return cls.setting is None or getattr(config, cls.setting) not in (None, False)


class JSONLines(Logger):
    """Appends one JSON object per step to metrics.jsonl."""

    is_needed = True

    def __init__(self, start: Start) -> None:
        self._path = start.run / METRICS
        if self._path.exists():
            # The last item, after the last line's end, is empty, or a line that a crash cut off: drop it.
            entries = [(line, metrics_entry(line)) for line in self._path.read_bytes().split(b"\n")[:-1]]
            kept = [line + b"\n" for line, entry in entries if entry is not None and entry["step"] <= start.step]
            write_atomically(self._path, b"".join(kept))
        self._file = self._path.open("a")

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        with naming(self._path):
            self._file.write(msgspec.json.encode({"step": step, **metrics}).decode() + "\n")  # writes NaN as null
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with suppress(OSError) if failed else naming(self._path):  # must not hide the error that ended the run
            self._file.close()


def format_duration(seconds: float) -> str:
    """Return a duration as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class ProgressLine(Logger):
    """Shows a progress line on a terminal; if the output is no terminal, prints a line every `log_interval` steps."""

    is_needed = True

    def __init__(self, start: Start) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console, self._interval, self._total = start.console, start.logging.log_interval, start.steps
        self._started, self._start_step = time.monotonic(), start.step
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
        texts = [form.format(metrics[name]) for name, form in PROGRESS_FORMATS.items() if name in metrics]
        status = "  ".join(texts) or "skipped"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            seconds_per_step = (time.monotonic() - self._started) / max(1, step - self._start_step)
            seconds_left = seconds_per_step * (self._total - step)
            line = f"step {step}/{self._total}  {status}  left {format_duration(seconds_left)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """Stop updating the progress line."""
        self._bar.stop()


class TensorBoard(Logger):
    """Writes TensorBoard's event files: the metrics in groups, and the configuration at each start."""

    setting = "tensorboard"

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(start.run / TENSORBOARD_FOLDER), purge_step=start.step + 1)
        self._writer.add_text(
            "configuration", f"```yaml\n{yaml.safe_dump(start.values, sort_keys=False)}```", start.step
        )

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        for name, value in scalar_metrics(metrics).items():
            self._writer.add_scalar(dashboard_name(name), value, step)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the event files."""
        self._writer.close()


class WeightsAndBiases(Logger):
    """Logs to one W&B run, also after resuming: the id of the W&B run is kept in the run's folder.

    W&B cannot remove rows, so steps that its server already has are not sent again.
    """

    setting = "wandb_project"

    def __init__(self, start: Start) -> None:
        import wandb

        config = start.logging
        file = start.run / RUN_ID
        file.parent.mkdir(exist_ok=True)
        run_id = regular_file(file).read_text().strip() if file.exists() else uuid.uuid4().hex
        # Silent for the whole process: without a key, wandb then fails, and does not ask while other ranks wait.
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
        self._last_step = max(start.step, self._run.step - 1)  # `step` of W&B's run is the next one that it takes
        if self._run.url:
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step, unless the server has that step already."""
        if step > self._last_step:
            row = {dashboard_name(name): value for name, value in scalar_metrics(metrics).items()}
            self._run.log(row, step=step, commit=True)

    def close(self, *, failed: bool = False) -> None:
        """Send the remaining rows and end the W&B run."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for W&B's service process, which writes the last rows after `finish`


LOGGERS: dict[str, type[Logger]] = {
    METRICS: JSONLines,
    "progress": ProgressLine,
    "TensorBoard": TensorBoard,
    "Weights & Biases": WeightsAndBiases,
}
"""The loggers by their names in messages and pages; closed in this order, because W&B may wait for its server."""


class Loggers:
    """All loggers of a run. Every rank has this object, and only rank 0 writes.

    If a logger with `is_needed` fails, the run ends. Any other logger is dropped with a warning: a lost network is no
    reason to stop training.

    Args:
        start: the arguments of the loggers; `open` sets the step.
        extra_files: texts to write into the run's folder beside the configuration, by file name.
        is_writer: whether this is rank 0.
    """

    def __init__(self, start: Start, extra_files: Mapping[str, str], *, is_writer: bool) -> None:
        self._start, self._extra_files, self._is_writer = start, extra_files, is_writer
        self._open: dict[str, Logger] = {}
        self._failed: set[str] = set()

    def open(self, *, step: int) -> None:
        """Close all loggers, write the configuration to the run's folder, and open loggers that go on after `step`.

        Raises:
            InputError: the run's folder cannot be written.
        """
        self.close()
        if not self._is_writer:
            return
        start = replace(self._start, step=step)
        try:
            start.run.mkdir(parents=True, exist_ok=True)
            for name, text in {CONFIG: yaml.safe_dump(start.values, sort_keys=False), **self._extra_files}.items():
                write_atomically(start.run / name, text)
            for name, logger_class in LOGGERS.items():
                if logger_class.is_on(start.logging) and name not in self._failed:
                    with self._dropping_failed(name):
                        self._open[name] = logger_class(start)
        except OSError as error:
            raise InputError(
                f"training.run_dir {start.run} cannot be written ({error.strerror or error}); "
                "free space, or name another"
            ) from error

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a step's metrics in every open logger."""
        for name in list(self._open):
            with self._dropping_failed(name):
                self._open[name].write(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers in the order of `LOGGERS`; `failed`: the run ends with an error."""
        for name in list(self._open):
            with self._dropping_failed(name):
                self._open.pop(name).close(failed=failed)

    @contextmanager
    def _dropping_failed(self, name: str) -> Iterator[None]:
        """If the block fails, raise the error if the logger `is_needed`; else warn, and drop the logger for good."""
        try:
            yield
        except Exception as error:  # libraries and networks raise errors of any type
            if LOGGERS[name].is_needed:
                raise
            self._failed.add(name)
            logger.warning("%s is without this run's metrics from here on: %s: %s", name, type(error).__name__, error)
            if failed_logger := self._open.pop(name, None):
                with suppress(Exception):  # the first failure has been reported
                    failed_logger.close(failed=True)
