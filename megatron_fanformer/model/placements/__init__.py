"""The placements of FAN, by the name in `model.fan.placement`."""

from typing import TYPE_CHECKING, Literal

from megatron_fanformer.model.placements.attention import QKV, QKAndV
from megatron_fanformer.model.placements.base import (
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    PROJECTION,
    LayerTensor,
    Placement,
)
from megatron_fanformer.model.placements.ffn import FFN

PLACEMENTS: dict[str, Placement] = {placement.name: placement for placement in (QKV(), QKAndV(), FFN(), Placement())}
TRANSFORMER = Placement.name

if TYPE_CHECKING:
    PlacementName = str
else:
    PlacementName = Literal[tuple(PLACEMENTS)]


def all_tensors() -> dict[LayerTensor, list[str]]:
    """Return every tensor that a layer may have, with the placements that have it."""
    of_attention = [tensor for each in PLACEMENTS.values() for tensor in each.attention_tensors]
    of_mlp = [tensor for each in PLACEMENTS.values() for tensor in each.mlp_tensors]
    tensors = dict.fromkeys([INPUT_NORM, *of_attention, *HEAD_NORMS, PROJECTION, MLP_NORM, *of_mlp])
    return {tensor: [name for name, each in PLACEMENTS.items() if tensor in each.all_tensors()] for tensor in tensors}
