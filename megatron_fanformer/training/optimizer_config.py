"""The section `optimizer` of a run's configuration; apart from the optimizer itself, which imports torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the defaults are the paper's recipe for 1B."""

    lr: float = 4e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled decay of linear weights."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-5
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """The global gradient norm is clipped to this; 0 does not clip."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = [
            f"optimizer.{name} is {getattr(self, name)}; it must not be negative"
            for name in ("lr", "weight_decay", "clip_grad")
            if getattr(self, name) < 0
        ]
        found += [
            f"optimizer.{name} is {getattr(self, name)}; it must lie in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.adam_eps <= 0:
            found.append(f"optimizer.adam_eps is {self.adam_eps}; it must be above 0")
        return found
