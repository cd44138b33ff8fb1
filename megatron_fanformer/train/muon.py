"""Muon: the momentum of each matrix of a layer, orthogonalized; AdamW for embeddings, head, norms and biases.

The whole matrix is orthogonalized, whatever ranks hold it, so every layout trains the same model (megatron-core's
default, `blockwise`, is another model for each tensor parallel size). [p | g] of a layer's FAN maps is one matrix, and
so are gate and up together; QKV is three, as in Megatron-LM: the queries of all groups, the keys, and the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fanformer.train.update_rule import BY_MUON, AdamW, Group, StateDtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Muon(AdamW):
    """Updates matrices of layers by Muon, all else as AdamW does."""

    def torch_class(self) -> "type[torch.optim.Optimizer]":
        """Return Muon's, with an Adam of ours, also where Transformer Engine or apex brings one."""
        from megatron_fanformer.train.muon_optimizer import MuonAndAdam

        return MuonAndAdam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give the torch optimizer its settings and formats, and the matrices with the ranks that hold their parts."""
        from megatron_fanformer.train.muon_optimizer import connect

        super().connect(config, optimizer, stages)
        connect(config, optimizer, stages, self.takes_whole)

    def group_of(self, name: str, dimensions: int) -> Group:
        """Return what marks the matrices of layers."""
        return {BY_MUON: True} if self.takes_whole(name, dimensions) else super().group_of(name, dimensions)

    def states(self, group: Group) -> tuple[str, ...]:
        """Return the momentum, or Adam's moments."""
        return ("momentum_buffer",) if BY_MUON in group else super().states(group)

    def state_dtype(self, name: str) -> StateDtype:
        """Return the first moment's number format of the momentum, which is one; or Adam's."""
        return self.exp_avg_dtype if name == "momentum_buffer" else super().state_dtype(name)

    def last_update(self, weight: "torch.Tensor", state: Mapping[str, "torch.Tensor"], group: Group) -> "torch.Tensor":
        """Return Adam's; that of a matrix cannot be made again from its part (`last_update_norm`)."""
        assert BY_MUON not in group
        return super().last_update(weight, state, group)

    def last_update_norm(
        self, weight: "torch.Tensor", optimizer: "torch.optim.Optimizer", group: Group
    ) -> "torch.Tensor":
        """Return what the step noted of a matrix, or Adam's."""
        if BY_MUON not in group:
            return super().last_update_norm(weight, optimizer, group)
        norms: Mapping[torch.Tensor, torch.Tensor] = optimizer.update_norms  # type: ignore[attr-defined]
        return norms[weight]

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether it is a matrix of a layer."""
        in_layer = name.startswith(("self_attention.", "mlp.")) or ".layers." in name
        return dimensions == 2 and in_layer
