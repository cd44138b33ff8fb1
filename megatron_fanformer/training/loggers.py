"""Where a run's metrics go: metrics.jsonl and the terminal; where asked, TensorBoard, a table and Weights & Biases.

A resumed run takes away what was logged after the checkpoint that it resumes from, so that each step appears once.
Weights & Biases removes nothing: there, the steps that it has are left out.
"""

import csv
import io
import json
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import yaml
from rich.console import Console

from megatron_fanformer.checkpoint.run_lock import FolderWatch, file_of
from megatron_fanformer.checkpoint.store import CONFIG, METRICS, TENSORBOARD, metrics_entry
from megatron_fanformer.durable_files import naming, regular_file, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.markdown import code_block
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.logging_config import LoggingConfig
from megatron_fanformer.training.metrics import ProgressLine

TABLE = "metrics.csv"
BY_TOKENS = "by_tokens"  # a run beside the other in TensorBoard, whose axis is tokens, not steps
WANDB_ID = "wandb/run-id"
WANDB_STEP = "wandb/last-step"
WANDB_SECONDS = 60  # that a run waits for W&B's server, at its start and at its end

GROUPS = {
    "train": ("loss", "grad_norm", "params_norm", "update_norm", "learning_rate", "tokens", "skipped"),
    "speed": (
        "step_seconds",
        "tokens_per_second",
        "model_flops_per_second",
        "model_flops_utilization",
        "peak_memory_bytes",
        "work_seconds",
        "wait_seconds",
        "slowest_rank",
    ),
    "evaluation": ("validation_loss", "evaluation_seconds", "evaluation_share"),
}
"""The groups of a dashboard, and the first part of the names of the metrics that they hold."""
LOSSES = r"(train/loss|evaluation/.*[Ll]oss.*)"
LAYOUT = {
    "training": {
        "loss, nats per token": ["Multiline", [LOSSES]],
        "norms": ["Multiline", ["train/grad_norm", "train/params_norm", "train/update_norm"]],
    },
    "health": {
        "|phase| of the layer where it is largest": ["Multiline", ["health/phase_.*"]],
        "share of periodic units, of the worst layer": ["Multiline", ["health/dead_units", "health/coarse_units"]],
    },
}
"""Of TensorBoard's custom scalars."""

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """Where a run begins to log."""

    step: int
    """The last step that is kept of what was logged before."""
    tokens: int
    """Of all steps up to that one."""
    values: dict[str, Any]
    """The resolved configuration."""


class Logger(Protocol):
    """Something that records metrics."""

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step: numbers, texts, and lists of a number a layer."""

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed`: the run ends with an error."""


class Loggers:
    """All loggers of a run; every rank has one, and those of rank 0 write.

    What metrics.jsonl cannot take ends the run. Any other logger that fails is left out from then on, with a warning:
    a network that is gone is no reason to stop training.

    Args:
        folder: which folder the run's was when it was found what the run starts from, by `file_of`; None: none.
    """

    def __init__(
        self, config: RunConfig, console: Console, *, writes: bool, folder: tuple[int, int] | None = None
    ) -> None:
        self._config, self._console, self._writes, self._folder = config, console, writes, folder
        self._run = Path(config.training.run_dir)
        self._needed: list[Logger] = []
        self._others: dict[str, Logger] = {}

    def open(self, values: dict[str, Any], *, step: int, tokens: int) -> None:
        """Begin, or begin anew after the run went back, with the resolved configuration.

        Args:
            step: the last step that the run has taken; what is logged of later ones is taken away.
            tokens: of all steps so far.

        Raises:
            InputError: the run's folder cannot be written.
            FanformerError: it is another than that of the start, or gone.
        """
        self.close()
        if not self._writes:
            return
        if self._folder is not None:
            FolderWatch(self._run, self._folder).check()
        training, logging_config = self._config.training, self._config.logging
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            write_atomically(self._run / CONFIG, yaml.safe_dump(values, sort_keys=False))
            start = Start(step, tokens, values)
            self._needed.append(JSONLines(self._run, start))
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); free space, or name another"
            raise InputError(f"training.run_dir {self._run} {reason}") from error
        self._needed.append(
            ProgressLine(
                total_steps=training.steps,
                done_steps=step,
                log_interval=logging_config.log_interval,
                console=self._console,
            )
        )
        for name, make in _asked(logging_config, self._run, start).items():
            try:
                self._others[name] = make()
            except Exception as error:
                _tell_failed(name, error)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a step's metrics everywhere.

        Raises:
            FanformerError: the run's folder is gone, or another run's by now.
        """
        for needed in self._needed:
            needed.write(step, metrics)
        for name, other in list(self._others.items()):
            try:
                other.write(step, metrics)
            except Exception as error:  # whatever a library or a network raises
                _tell_failed(name, error)
                with suppress(Exception):  # one failure is told
                    self._others.pop(name).close(failed=True)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers; they can be opened again.

        Args:
            failed: whether the run ends with an error.
        """
        for name, other in self._others.items():
            try:
                other.close(failed=failed)
            except Exception as error:
                _tell_failed(name, error)
        for needed in reversed(self._needed):
            needed.close(failed=failed)
        self._needed, self._others = [], {}


def _tell_failed(name: str, error: Exception) -> None:
    logger.warning("%s is without this run's metrics from here on: %s: %s", name, type(error).__name__, error)


def _asked(config: LoggingConfig, run: Path, start: Start) -> dict[str, Callable[[], Logger]]:
    made: dict[str, Callable[[], Logger]] = {}
    if config.csv:
        made[TABLE] = lambda: Table(run, start)
    if config.tensorboard:
        made["TensorBoard"] = lambda: TensorBoard(run, start)
    if config.wandb_project is not None:
        made["Weights & Biases"] = lambda: WeightsAndBiases(config, run, start)
    return made


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step; of a list by layer its largest."""
    largest = {name: max(value) if isinstance(value, list) and value else value for name, value in metrics.items()}
    return {name: value for name, value in largest.items() if isinstance(value, int | float)}


def dashboard_name(name: str) -> str:
    """A metric's name on a dashboard, which shows together what has the same first part.

    (OLMo's names of evaluations begin with `eval/`.)
    """
    first, _, rest = name.partition("/")
    if first == "eval":
        return f"evaluation/{rest}"
    group = next((group for group, names in GROUPS.items() if first in names), None)
    return name if group is None and rest else f"{group or 'train'}/{name}"


class JSONLines:
    """Appends one object per step to metrics.jsonl. Lines that no run wrote are kept as they are."""

    def __init__(self, run: Path, start: Start) -> None:
        self._path = run / METRICS
        _drop_steps_after(self._path, start.step)
        self._file = self._path.open("a")
        self._watch = FolderWatch(run)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Raises:
            FanformerError: the run's folder is gone, or another run's by now.
        """
        self._watch.check()
        if file_of(str(self._path)) != file_of(self._file.fileno()):  # removed, or replaced, as editors do
            self._file.close()
            self._file = self._path.open("a")
        with naming(self._path):
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


def _drop_steps_after(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    *lines, _torn = path.read_bytes().split(b"\n")  # a crash in the middle of a write leaves a line without its end
    steps = [None if entry is None else entry["step"] for entry in map(metrics_entry, lines)]
    if None in steps:
        logger.warning("%s: line %d is not a step's metrics; such lines are kept", path, steps.index(None) + 1)
    kept = [line + b"\n" for line, step in zip(lines, steps, strict=True) if step is None or step <= last_step]
    write_atomically(path, b"".join(kept))


class Table:
    """metrics.csv: a row a step, a column a metric; of a list by layer its largest.

    A metric that appears for the first time gets a column at the end, for which the file is written anew.
    """

    def __init__(self, run: Path, start: Start) -> None:
        self._path = run / TABLE
        self._columns = ["step"]
        if self._path.exists():
            text = regular_file(self._path).read_text(encoding="utf-8")
            rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # the last may be torn
            if "step" not in (rows.fieldnames or self._columns):
                raise ValueError(f"{self._path} is not a table of a run's steps; move it away")
            self._columns = list(rows.fieldnames or self._columns)
            self._rewrite([row for row in rows if int(row["step"]) <= start.step])
        else:
            self._rewrite([])

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        texts = {name: value for name, value in metrics.items() if isinstance(value, str)}
        row = {"step": step, **numbers(metrics), **texts}
        if new := [name for name in row if name not in self._columns]:
            self._file.close()
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        self._rows.writerow(row)
        self._file.flush()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue())
        self._file = self._path.open("a", encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files: the metrics in groups, the losses by tokens too, and the configuration."""

    def __init__(self, run: Path, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run / TENSORBOARD
        self._by_step = SummaryWriter(str(folder), purge_step=start.step + 1)
        self._by_tokens = SummaryWriter(str(folder / BY_TOKENS), purge_step=start.tokens + 1)
        configuration = code_block(yaml.safe_dump(start.values, sort_keys=False), "yaml")
        self._by_step.add_text("configuration", configuration, start.step)
        self._by_step.add_custom_scalars(LAYOUT)
        for summary in hparams(_hyperparameters(start.values), {"train/loss": None}):
            cast(Any, self._by_step.file_writer).add_summary(summary)  # typed as the None that it was once

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        for name, value in numbers(metrics).items():
            self._by_step.add_scalar(dashboard_name(name), value, step)
            if name == "loss" or name.startswith(("validation_loss/", "eval/")):
                self._by_tokens.add_scalar(f"{BY_TOKENS}/{name}", value, metrics["tokens"])

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files."""
        self._by_step.close()
        self._by_tokens.close()


def _hyperparameters(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration's numbers, texts and switches, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _hyperparameters(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{name}"] = value
    return found


class WeightsAndBiases:
    """One W&B run for the whole run, however often that is resumed: its id is kept in the run's folder."""

    def __init__(self, config: LoggingConfig, run: Path, start: Start) -> None:
        import wandb

        file, given = run / WANDB_ID, run / WANDB_STEP
        file.parent.mkdir(exist_ok=True)
        given.touch()
        last_step = int(regular_file(given).read_text() or 0)
        run_id = regular_file(file).read_text().strip() if file.exists() else uuid.uuid4().hex
        _wait_for_own_folder(file.parent, run_id)
        # For the whole process, so that without a key it fails, and asks for none: the other ranks would wait.
        wandb.setup(wandb.Settings(silent=True))
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            mode=config.wandb_mode,
            id=run_id,
            resume="allow",
            dir=str(run),
            config=start.values,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS
            ),
        )
        write_atomically(file, self._run.id)
        # Rows cannot be taken back: what W&B has already stays. Online, its server knows what that is.
        self._last_step = last_step if self._run.offline else self._run.step - 1
        self._given = given.open("r+")
        if not self._run.offline:
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        if step > self._last_step:
            row = {dashboard_name(name): value for name, value in numbers(metrics).items()}
            self._run.log(row, step=step, commit=True)
            self._last_step = step
            self._given.seek(0)
            self._given.write(f"{step:20}\n")  # one write over the last, which is as long
            self._given.flush()

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end."""
        import wandb

        self._given.close()
        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for W&B's own process, which writes the last rows after `finish`


def _wait_for_own_folder(folder: Path, run_id: str) -> None:
    """Until the second is over in which an earlier life began: W&B names the folder and the file of a life by it."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(0.05)
