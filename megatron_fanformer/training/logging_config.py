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

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        if self.log_interval < 1:
            return [f"logging.log_interval is {self.log_interval}; it must be at least 1"]
        return []
