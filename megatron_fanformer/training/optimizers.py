"""The section `optimizer` of a configuration, and the optimizers that it can name; without torch.

A new one is a file with a subclass of `UpdateRule`, and an entry of `OPTIMIZERS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_fanformer.errors import broken_fields, did_you_mean
from megatron_fanformer.planning.gradient_buffers import EMBEDDING, OptimizerStates

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before
    import torch

STATE_ELEMENT_BYTES = 4
"""States are float32, as the main weights are."""

Group = Mapping[str, Any]
"""A parameter group, or what `UpdateRule.group_of` says of one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer's settings; the defaults are the paper's recipe for 1B."""

    name: str = "adamw"
    """The optimizer: `adamw`. A run keeps the one that it began with."""
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
        """Return the rules of single fields that this configuration breaks, one line each."""
        found = []
        if self.name not in OPTIMIZERS:
            remedy = did_you_mean(self.name.lower(), OPTIMIZERS, f"name {', '.join(OPTIMIZERS)}")
            found.append(f"optimizer.name is {self.name!a}, which is no optimizer here; {remedy}")
        broken = partial(broken_fields, "optimizer", self)
        return [
            *found,
            *broken("not be negative", lambda value: value < 0, "lr", "weight_decay", "clip_grad"),
            *broken("lie in [0, 1)", lambda value: not 0 <= value < 1, "adam_beta1", "adam_beta2"),
            *broken("be above 0", lambda value: value <= 0, "adam_eps"),
        ]


class UpdateRule(OptimizerStates, ABC):
    """How a run's weights are updated, which states that needs, and how a checkpoint stores them.

    megatron-core shards, clips and keeps main weights for any of them, with `torch_class` in the place of its Adam.
    The distributed optimizer cuts main weights into flat ranges: what an update has to know of a weight's shape or name
    must stand in its parameter group.
    """

    resumed_entries: ClassVar[tuple[str, ...]] = ("step",)
    """Entries that a resumed run takes from a checkpoint's parameter groups; its configuration sets the others."""

    @abstractmethod
    def megatron_settings(self, config: OptimizerConfig) -> dict[str, Any]:
        """Return fields of megatron-core's OptimizerConfig, beside those of all optimizers (rate, decay, clipping).

        The torch optimizer is made with `lr` and `weight_decay`, and with `betas` and `eps` from `adam_beta1`,
        `adam_beta2` and `adam_eps`.
        """

    @abstractmethod
    def torch_class(self) -> "type[torch.optim.Optimizer] | None":
        """Return the torch optimizer that takes the place of megatron-core's Adam; None: that one is it.

        It keeps its state in tensors of the weight's shape, and everything else in the parameter group.
        """

    @abstractmethod
    def group_of(self, name: str, dimensions: int) -> Group:
        """Return the entries that set a weight's parameter group apart; weights with the same ones share a group.

        `wd_mult` multiplies the decay, `lr_mult` the learning rate; others are the rule's own.

        Args:
            name: as Megatron's modules name it, with any prefix; a tied embedding's second copy goes by `EMBEDDING`.
            dimensions: 1 of norms and biases, 2 of matrices.
        """

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of what is kept of each weight of a parameter group, as checkpoints have them."""

    @abstractmethod
    def last_update(self, weight: "torch.Tensor", state: Mapping[str, "torch.Tensor"], group: Group) -> "torch.Tensor":
        """Return what the last step added to a main weight (or a part of it), from what the step left behind."""

    def state_bytes(self, name: str, dimensions: int) -> int:
        """Return the bytes of state of each element of a weight; arguments as for `group_of`."""
        return STATE_ELEMENT_BYTES * len(self.states(self.group_of(name, dimensions)))


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """Adam with decoupled decay, of linear weights alone, as the reference has it.

    Norms, biases and embeddings are not decayed (a tied head is the embedding).
    """

    def megatron_settings(self, config: OptimizerConfig) -> dict[str, Any]:
        """Return Adam's own fields."""
        return {
            "optimizer": "adam",
            "adam_beta1": config.adam_beta1,
            "adam_beta2": config.adam_beta2,
            "adam_eps": config.adam_eps,
        }

    def torch_class(self) -> "type[torch.optim.Optimizer] | None":
        """Return ours where neither Transformer Engine nor apex brings a fused one.

        With torch's AdamW, megatron-core's distributed optimizer loads the *same* step tensor into every parameter's
        state; it then advances once per parameter, and a resumed run silently goes wrong.
        """
        import megatron.core.optimizer as megatron_optimizer

        from megatron_fanformer.training.adam import Adam

        return Adam if megatron_optimizer.USING_PYTORCH_OPTIMIZER else None

    def group_of(self, name: str, dimensions: int) -> Group:
        """Return the multiplier of the decay, where there is none."""
        return {"wd_mult": 0.0} if dimensions == 1 or EMBEDDING in name else {}

    def states(self, group: Group) -> tuple[str, ...]:
        """Return both moments."""
        return ("exp_avg", "exp_avg_sq")

    def last_update(self, weight: "torch.Tensor", state: Mapping[str, "torch.Tensor"], group: Group) -> "torch.Tensor":
        """Return -lr (m' / (sqrt v' + eps) + decay * the weight before)."""
        lr, steps, (beta1, beta2) = group["lr"], group["step"], group["betas"]
        size = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        rate = (state["exp_avg"] / (1 - beta1**steps)).div_(size)
        decay = group["weight_decay"]
        before = (weight + lr * rate).div_(1 - lr * decay)
        return rate.add_(before, alpha=decay).mul_(-lr)


OPTIMIZERS: dict[str, UpdateRule] = {"adamw": AdamW()}
"""The optimizers by `optimizer.name`."""
