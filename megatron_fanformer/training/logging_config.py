"""The section `logging` of a run's configuration: the fields of every logger, and what else is recorded."""

from dataclasses import dataclass

from megatron_fanformer.training.loggers.registry import LOGGERS

# The fields of the last base come first.
_FIELDS = [kind.Fields for kind in reversed(LOGGERS.values()) if kind.Fields is not None]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(*_FIELDS):  # type: ignore[misc]  # the table's, whichever they are
    """What is recorded, and how often it is shown."""

    norm_interval: int | None = 100
    """Steps from one line with the norms of all weights and of their last update, and the largest peak memory of any
    rank, to the next; null: none."""
    phase_interval: int | None = 1000
    """Steps from one look at the FAN map's phases to the next (docs/metrics.md#phase-health); null: none. There is none
    of a model without phases, nor with CUDA graphs."""
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
        """Return the rules of single fields that this configuration breaks, one line each."""
        found = [problem for kind in LOGGERS.values() for problem in kind.problems(self)]
        for name in ("norm_interval", "phase_interval", "straggler_interval"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"logging.{name} is {value}; it must be at least 1, or null")
        if not self.straggler_factor > 1:
            found.append(f"logging.straggler_factor is {self.straggler_factor}; it must be above 1")
        return found
