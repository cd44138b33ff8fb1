"""The section `recovery` of a run's configuration: what a run does by itself about damage and bad numbers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run does by itself about damage, and about steps whose numbers are bad."""

    use_earlier_checkpoint: bool = True
    """If the newest checkpoint is damaged, resume from the newest sound one; false: refuse (exit code 3)."""
    check_for_nan_in_loss_and_grad: bool = True
    """A step is bad if its loss or gradient norm is not finite."""
    check_for_spiky_loss: bool = False
    """A step is also bad if its loss or gradient norm is a spike."""
    spiky_loss_factor: float = 2.0
    """A spike is a loss above this many times the running median."""
    spiky_grad_norm_factor: float = 10.0
    """A spike is a gradient norm above this many times the running median."""
    spike_window: int = 100
    """Good steps in the running medians; there are no spikes before a tenth of them."""
    compute_again: bool = True
    """Compute a bad step again first; if it is good then, take it, and name the ranks whose numbers differed."""
    max_bad_steps_in_a_row: int = 3
    """After this many bad steps the run goes back to the last checkpoint before them and skips them; 0: the first one
    ends the run (exit code 4)."""
    max_rewinds: int = 2
    """How often a run goes back without progress before it ends (exit code 4)."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps whose samples are skipped."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = [
            f"recovery.{name} is {getattr(self, name)}; it must be above 1"
            for name in ("spiky_loss_factor", "spiky_grad_norm_factor")
            if not getattr(self, name) > 1
        ]
        found += [
            f"recovery.{name} is {getattr(self, name)}; it must not be negative"
            for name in ("max_bad_steps_in_a_row", "max_rewinds")
            if getattr(self, name) < 0
        ]
        if self.spike_window < 10:
            found.append(f"recovery.spike_window is {self.spike_window}; it must be at least 10")
        if bad := [step for step in self.iterations_to_skip if step < 1]:
            found.append(f"recovery.iterations_to_skip has {bad[0]}; steps count from 1")
        return found
