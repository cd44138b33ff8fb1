"""Where a model's tensors say that there is FAN, and with which p_ratio: by names and shapes alone, in any format.

What acts on the linear rows g (`activation`) has no weights, and no tensor tells of it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.name_table import NAME_TABLE, Format
from megatron_fanformer.formats.p_ratio import inferred_p_ratio
from megatron_fanformer.model.config import Placement

Shape = tuple[int, ...]

LAYER = "layers.{layer}."
NORM, FAN, V_FAN = "input_layernorm", "self_attention.fan.linear", "self_attention.fan.v_linear"
QK, FFN_IN, FFN_OUT = "self_attention.linear_qk", "mlp.linear_fc1", "mlp.linear_fc2"


class SeenFAN(NamedTuple):
    """The fields of `model.fan` that tensors tell."""

    placement: Placement
    p_ratio: float | None
    """None without FAN."""
    v_p_ratio: float | None
    """Of the values' own FAN layer (placement `qk_and_v`)."""
    bias: bool | None
    """None without FAN."""


def fan_of_tensors(shapes: Mapping[str, Shape], format: Format = "megatron") -> SeenFAN:
    """The FAN of a model's first layer; the others are built like it.

    Args:
        shapes: of all tensors, by their names in that format.

    Raises:
        CorruptError: there is no whole layer among them, or they are of no p_ratio.
    """
    layer = _first_layer(shapes, format)
    if missing := {NORM, FFN_IN, FFN_OUT} - layer.keys():
        raise CorruptError(
            f"the {format} weights have no {', '.join(sorted(missing))} in layer 0; name all tensors of a model"
        )
    hidden_size, ffn_hidden_size = layer[NORM][0], layer[FFN_OUT][1]
    if FAN in layer:
        values = layer.get(V_FAN)
        value_size = layer[QK][0] - hidden_size if values else 0
        return SeenFAN(
            placement="qk_and_v" if values else "qkv",
            p_ratio=inferred_p_ratio(layer[FAN][0], hidden_size, None),
            v_p_ratio=inferred_p_ratio(values[0], value_size, None) if values else None,
            bias=f"{FAN}.bias" in layer,
        )
    if layer[FFN_IN][0] == 2 * ffn_hidden_size:  # gate and up of a SwiGLU
        return SeenFAN("none", None, None, None)
    return SeenFAN("ffn", inferred_p_ratio(layer[FFN_IN][0], ffn_hidden_size, None), None, f"{FFN_IN}.bias" in layer)


def _first_layer(shapes: Mapping[str, Shape], format: Format) -> dict[str, Shape]:
    """Shapes of layer 0 by Megatron's names (without .weight), those of a tensor in parts put together by rows."""
    layer: dict[str, Shape] = {}
    for row in NAME_TABLE:
        (megatron,) = row.megatron.names
        names = [name.format(layer=0, att_proj="att_proj.linear") for name in row.naming(format).names]
        if LAYER in megatron and names and all(name in shapes for name in names):
            rows = sum(shapes[name][0] for name in names)
            layer[megatron.partition(LAYER)[2].removesuffix(".weight")] = (rows, *shapes[names[0]][1:])
    return layer
