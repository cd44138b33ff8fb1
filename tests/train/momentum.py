"""A second optimizer, of two kinds of weights: SGD with momentum for matrices of layers, AdamW for all others.

All of it is here but the entry in `OPTIMIZERS`, which `registered` makes for as long as a test needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from megatron_fanformer.train.optimizers import OPTIMIZERS, AdamW, Group
from megatron_fanformer.train.torch_optimizers import Adam

NAME = "momentum"
MATRICES_OF_LAYERS = {"momentum": 0.8, "lr_mult": 0.5}


class MomentumAndAdam(Adam):
    """SGD with momentum where a group names one, else AdamW."""

    def _step_group(self, group: dict[str, Any]) -> None:
        if "momentum" not in group:
            super()._step_group(group)
            return
        for weight in group["params"]:
            if not self.state[weight]:
                self.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
            buffer = self.state[weight]["momentum_buffer"].mul_(group["momentum"]).add_(weight.grad)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(buffer, alpha=group["lr"])


@dataclass(frozen=True)
class Momentum(AdamW):
    """As AdamW but for matrices of layers."""

    def torch_class(self) -> type[torch.optim.Optimizer]:
        """Return the one above, whatever brings another Adam."""
        return MomentumAndAdam

    def group_entries(self, name: str, dimensions: int) -> Group:
        """Return momentum and rate of matrices of layers."""
        return MATRICES_OF_LAYERS if dimensions == 2 and "linear" in name else super().group_entries(name, dimensions)

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return one buffer, or Adam's moments."""
        return ("momentum_buffer",) if "momentum" in group else super().state_names(group)


@contextmanager
def registered() -> Iterator[None]:
    """A process in which a run can name it."""
    with mock.patch.dict(OPTIMIZERS, {NAME: Momentum()}):
        yield
