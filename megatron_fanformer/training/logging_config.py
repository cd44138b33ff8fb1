"""The section `logging` of a run's configuration; apart from the writers, which import a terminal library."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is recorded, and how often it is shown."""

    log_interval: int = 10
    """Steps between printed lines if the output is not a terminal."""
    tensorboard: bool = True
    """Write TensorBoard's event files."""
    csv: bool = False
    """Write `metrics.csv` too."""
    wandb_project: str | None = None
    """Project of Weights & Biases (the extra `wandb`); null: none."""
    wandb_entity: str | None = None
    """Team or user there; null: the account's own."""
    wandb_exp_name: str | None = None
    """Name of the run there; null: W&B chooses."""
    wandb_mode: Literal["online", "offline"] | None = None
    """`offline` keeps the log in the run's folder, for `wandb sync`; null: by WANDB_MODE, else online."""
    norm_interval: int | None = 100
    """Steps between lines with norms of weights and updates and the peak memory; null: none."""
    phase_interval: int | None = 1000
    """Steps between measurements of the FAN map's phases (docs/metrics.md#phase-health); null: none. None with CUDA
    graphs."""
    folder: str | None = None
    """Folder for a log file of each rank at level DEBUG (`rank-00000.log` and so on); null: none. `train --log-file`
    takes precedence."""
    straggler_interval: int | None = 100
    """Steps between checks for a slow rank (docs/clusters.md#slow-ranks); null: none."""
    straggler_factor: float = 1.4
    """The slowest rank is named if its own work takes more than this times the median of its pipeline stage, and the
    others wait more than a tenth of a step."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = []
        if self.log_interval < 1:
            found.append(f"logging.log_interval is {self.log_interval}; it must be at least 1")
        for name in ("norm_interval", "phase_interval", "straggler_interval"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"logging.{name} is {value}; it must be at least 1, or null")
        if not self.straggler_factor > 1:
            found.append(f"logging.straggler_factor is {self.straggler_factor}; it must be above 1")
        return found
