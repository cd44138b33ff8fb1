"""How weights are updated: the base of optimizers, and AdamW; without torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_fanformer.plan.gradient_buffers import EMBEDDING, OptimizerStates

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before
    import torch

StateDtype = Literal["fp32", "bf16"]
STATE_ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}

BY_MUON = "is_orthogonalized"
"""Entry of the parameter groups of matrices that Muon updates."""

Group = Mapping[str, Any]
"""A parameter group, or what `UpdateRule.group_of` says of one."""


class UpdateRule(OptimizerStates, ABC):
    """How a run's weights are updated, which states that needs, and how a checkpoint stores them.

    megatron-core shards, clips and keeps main weights for any of them, with `torch_class` in the place of its Adam.
    The distributed optimizer cuts main weights into flat ranges: what an update has to know of a weight's shape or name
    must stand in its parameter group.
    """

    resumed_entries: ClassVar[tuple[str, ...]] = ("step",)
    """Entries that a resumed run takes from a checkpoint's parameter groups; its configuration sets the others."""

    @abstractmethod
    def megatron_settings(self, config: Any) -> dict[str, Any]:
        """Return fields of megatron-core's OptimizerConfig, beside those of all optimizers (rate, decay, clipping), by
        the section `optimizer` of a run's configuration.

        The torch optimizer is made with `lr` and `weight_decay`, and with `betas` and `eps` from `adam_beta1`,
        `adam_beta2` and `adam_eps`.
        """

    def configured(self, config: Any) -> "UpdateRule":
        """Return it as the section `optimizer` of a run's configuration has it: unchanged."""
        return self

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

    def state_dtype(self, name: str) -> StateDtype:
        """Return the number format of a state: float32, as the main weights are."""
        return "fp32"

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give the torch optimizer of megatron-core's `optimizer` what it must know of states, ranks and weights:
        nothing.
        """

    @abstractmethod
    def last_update(self, weight: "torch.Tensor", state: Mapping[str, "torch.Tensor"], group: Group) -> "torch.Tensor":
        """Return what the last step added to a main weight (or a part of it), from what the step left behind."""

    def last_update_norm(
        self, weight: "torch.Tensor", optimizer: "torch.optim.Optimizer", group: Group
    ) -> "torch.Tensor":
        """Return the norm of that."""
        from megatron_fanformer.ops.matrices import norm

        return norm(self.last_update(weight, optimizer.state[weight], group))

    def state_bytes(self, name: str, dimensions: int) -> int:
        """Return the bytes of state of each element of a weight; arguments as for `group_of`."""
        number = 0
        for state in self.states(self.group_of(name, dimensions)):  # a search calls it tens of thousands of times
            number += STATE_ELEMENT_BYTES[self.state_dtype(state)]
        return number

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return False: the update of an element depends on that element alone."""
        return False


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """Adam with decoupled decay, of linear weights alone, as the reference has it.

    Norms, biases and embeddings are not decayed (a tied head is the embedding).
    """

    exp_avg_dtype: StateDtype = "fp32"
    exp_avg_sq_dtype: StateDtype = "fp32"

    def megatron_settings(self, config: Any) -> dict[str, Any]:
        """Return Adam's own fields."""
        return {
            "optimizer": "adam",
            "adam_beta1": config.adam_beta1,
            "adam_beta2": config.adam_beta2,
            "adam_eps": config.adam_eps,
        }

    def configured(self, config: Any) -> "UpdateRule":
        """Return it with the moments' number formats."""
        return replace(self, exp_avg_dtype=config.exp_avg_dtype, exp_avg_sq_dtype=config.exp_avg_sq_dtype)

    def torch_class(self) -> "type[torch.optim.Optimizer] | None":
        """Return ours where neither Transformer Engine nor apex brings a fused one for these moments.

        With torch's AdamW, megatron-core's distributed optimizer loads the *same* step tensor into every parameter's
        state; it then advances once per parameter, and a resumed run silently goes wrong.
        """
        import megatron.core.optimizer as megatron_optimizer

        from megatron_fanformer.train.adam import Adam, with_bf16_moments

        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            return Adam
        formats = {self.exp_avg_dtype, self.exp_avg_sq_dtype}
        if formats == {"fp32"}:
            return None
        # Of one moment in bf16 the Engine's step makes float32 copies of all weights' at once; ours of a block.
        return with_bf16_moments(megatron_optimizer.Adam) if formats == {"bf16"} else Adam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give our Adam the number formats of its states."""
        from megatron_fanformer.model.dtypes import DTYPES
        from megatron_fanformer.train.adam import Adam

        if isinstance(own := optimizer.optimizer, Adam):
            names = {name for group in own.param_groups for name in self.states(group)}
            own.state_dtypes = {name: DTYPES[self.state_dtype(name)] for name in names}

    def group_of(self, name: str, dimensions: int) -> Group:
        """Return the multiplier of the decay, where there is none."""
        return {"wd_mult": 0.0} if dimensions == 1 or EMBEDDING in name else {}

    def states(self, group: Group) -> tuple[str, ...]:
        """Return both moments."""
        return ("exp_avg", "exp_avg_sq")

    def state_dtype(self, name: str) -> StateDtype:
        """Return a moment's number format."""
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}.get(name, "fp32")

    def last_update(self, weight: "torch.Tensor", state: Mapping[str, "torch.Tensor"], group: Group) -> "torch.Tensor":
        """Return -lr (m' / (sqrt v' + eps) + decay * the weight before); of moments in bf16 by what they are rounded
        to.
        """
        lr, steps, (beta1, beta2) = group["lr"], group["step"], group["betas"]
        size = (state["exp_avg_sq"].float() / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        rate = (state["exp_avg"].float() / (1 - beta1**steps)).div_(size)
        decay = group["weight_decay"]
        before = (weight + lr * rate).div_(1 - lr * decay)
        return rate.add_(before, alpha=decay).mul_(-lr)
