"""The section `recovery` of a run's configuration: what a run does by itself about damage and bad numbers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run does by itself about damage, and about steps whose numbers are bad."""

    use_earlier_checkpoint: bool = True
    """Where the newest checkpoint is damaged, set it aside and resume from the newest one that is not; false: refuse
    (exit code 3)."""
    check_for_nan_in_loss_and_grad: bool = True
    """A step is bad if its loss or gradient norm is not finite; false: it is taken as it is."""
    check_for_spiky_loss: bool = False
    """A step is also bad if its loss or its gradient norm is a spike, by the two factors below."""
    spiky_loss_factor: float = 2.0
    """A loss of more than this many times the running median is a spike."""
    spiky_grad_norm_factor: float = 10.0
    """A gradient norm of more than this many times the running median is a spike."""
    spike_window: int = 100
    """Good steps that the running medians are taken over; there are no spikes before a tenth of them."""
    compute_again: bool = True
    """A bad step is computed again before anything is done about it. If it is good then, a machine was at fault: the
    step is taken, and the log names the ranks whose numbers differed."""
    max_bad_steps_in_a_row: int = 3
    """A bad step's samples are skipped, and the weights stay as they are. After this many in a row the run goes back to
    the last checkpoint before them and skips them from the start; 0: the first bad step ends the run (exit code 4)."""
    max_rewinds: int = 2
    """How often a run goes back before it ends (exit code 4), if no good step after the bad ones and a new checkpoint
    come in between."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps whose samples are skipped, without computing anything."""

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
