"""The section `logging` of a run's configuration; apart from the writers, which import a terminal library."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is recorded, and how often it is shown."""

    log_interval: int = 10
    """Steps between printed lines where the output is not a terminal; `metrics.jsonl` has every step."""
    tensorboard: bool = True
    """Whether to write TensorBoard's event files."""
    folder: str | None = None
    """Folder for a log file of each rank (`rank-00000.log` and so on, appended to): what the run does, at level DEBUG,
    with time, level, rank and module, every warning, and the traceback of an error; null: none. `train --log-file`
    takes precedence."""
    straggler_interval: int | None = 100
    """Steps from one look for a slow rank to the next: own work and waiting of every rank, over the last four steps,
    in the metrics, and the slowest in the log where it stands out; null: none (docs/clusters.md#slow-ranks)."""
    straggler_factor: float = 1.4
    """The slowest rank is named where its own work takes more than this times the median of its pipeline stage, and
    that is more than a tenth of a step."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = []
        if self.log_interval < 1:
            found.append(f"logging.log_interval is {self.log_interval}; it must be at least 1")
        if self.straggler_interval is not None and self.straggler_interval < 1:
            found.append(f"logging.straggler_interval is {self.straggler_interval}; it must be at least 1, or null")
        if not self.straggler_factor > 1:
            found.append(f"logging.straggler_factor is {self.straggler_factor}; it must be above 1")
        return found
