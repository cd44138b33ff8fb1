"""The table of loggers, the section `logging` of a run's configuration, and the loggers of a run.

A resumed run removes the records of steps after its checkpoint, so that each step appears once.
"""

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_fanformer.checkpoint.run_folder import CONFIG, METRICS
from megatron_fanformer.durable_files import write_atomically, write_refusal
from megatron_fanformer.errors import InputError, broken_fields
from megatron_fanformer.train.logger_kinds import (
    JSONLines,
    Logger,
    ProgressLine,
    Start,
    TensorBoard,
    WeightsAndBiases,
)

if TYPE_CHECKING:
    from rich.console import Console

LOGGERS: dict[str, type[Logger]] = {
    METRICS: JSONLines,
    "progress": ProgressLine,
    "TensorBoard": TensorBoard,
    "Weights & Biases": WeightsAndBiases,
}
"""The loggers by their names in messages and pages. They are closed in this order: what may wait for a server, and be
ended meanwhile, comes last."""

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
    """Return the packages that this machine lacks for the loggers that are on, one line each."""
    problems = []
    for kind in LOGGERS.values():
        if kind.package is None or not kind.is_on(config):
            continue
        package = importlib.util.find_spec(kind.package)
        if package is None or package.origin is None:  # a folder of that name, as W&B itself makes
            problems.append(
                f"logging.{kind.setting} is set, but {kind.package} is not installed; install "
                f"megatron_fanformer[{kind.package}], or turn it off"
            )
    return problems


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
            reason = f"cannot be written ({write_refusal(error, self._run)}); free space, or name another"
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
