"""The section `optimizer` of a run's configuration; apart from the optimizer itself, which imports torch."""

import difflib
from dataclasses import dataclass

from megatron_fanformer.training.optimizers import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The defaults are the paper's recipe for 1B."""

    name: str = "adamw"
    """What updates the weights: `adamw`. A run keeps its own."""
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
        found = [] if self.name in OPTIMIZERS else [f"optimizer.name is {self.name!a}, {_known_names(self.name)}"]
        found += [
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


def _known_names(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"name {', '.join(OPTIMIZERS)}"
    return f"which is no optimizer here; {remedy}"
