"""The FAN that a model's tensors show, and its p_ratio: by names and shapes alone, in any format.

p_ratio is never guessed, and refused where a stated one disagrees. What acts on the linear rows g (`activation`) has no
weights, and no tensor shows it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_fanformer.convert.name_table import Format, layer_row
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.model.config import p_ratio_of
from megatron_fanformer.model.placements import PLACEMENTS, PlacementName, all_tensors

Shape = tuple[int, ...]

LAYER = "layers.{layer}."
NEEDED = {"input_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"}


class SeenFAN(NamedTuple):
    """The fields of `model.fan` that tensors show."""

    placement: PlacementName
    p_ratio: float | None
    """The map's p_ratio; None without FAN."""
    v_p_ratio: float | None
    """p_ratio of the values' own FAN layer (placement `qk_and_v`)."""
    bias: bool | None
    """Whether the map has a bias; None without FAN."""


def fan_of_tensors(shapes: Mapping[str, Shape], format: Format = "megatron") -> SeenFAN:
    """Return the FAN of a model's first layer; the others are built like it.

    Args:
        shapes: of all tensors, by their names in that format.

    Raises:
        CorruptError: there is no whole layer among them, or they are of no p_ratio.
    """
    layer = _first_layer(shapes, format)
    if missing := NEEDED - layer.keys():
        raise CorruptError(
            f"the {format} weights have no {', '.join(sorted(missing))} in layer 0; name all tensors of a model"
        )
    of_fan = {name for each in PLACEMENTS.values() for name in each.own_tensors} & layer.keys()
    for name, placement in PLACEMENTS.items():
        if placement.own_tensors == of_fan and placement.fits(layer):
            ratios = [inferred_p_ratio(rows, width, None) for rows, width in placement.seen_maps(layer)]
            p_ratio, v_p_ratio, *_ = *ratios, None, None
            has_bias = any(tensor.endswith(".bias") for tensor in layer)  # which only FAN has
            return SeenFAN(name, p_ratio, v_p_ratio, has_bias if placement.is_fanformer else None)
    raise CorruptError(f"the {format} weights have {', '.join(sorted(of_fan))} in layer 0, and no placement has")


def inferred_p_ratio(fan_rows: int, width: int, stated: float | None, name: str = "p_ratio") -> float:
    """Return the p_ratio of a FAN map of `fan_rows` rows whose output is `width` wide: w - P rows, since P + G = P + (w
    - 2P).

    Returns `stated` where it gives that many rows, else P / w where nothing was stated.

    Raises:
        CorruptError: no p_ratio gives `fan_rows` rows; or the stated one gives another number of rows. Then the
            checkpoint contradicts itself, since no option states a p_ratio.
    """
    periodic = width - fan_rows
    if not 0 <= periodic <= width // 2:
        raise CorruptError(
            f"the FAN map has {fan_rows} rows, but at hidden size {width} it must have "
            f"{-(-width // 2)} to {width}; use the weights of this model"
        )
    actual = p_ratio_of(periodic, width)
    if stated is None:
        return actual
    is_share = type(stated) in (int, float) and 0 <= stated <= 1  # a checkpoint may state anything
    if not is_share or int(stated * width) != periodic:
        raise CorruptError(
            f"{name} is stated as {stated}, but the FAN map's {fan_rows} rows at hidden size {width} "
            f"are those of p_ratio {actual:g}; correct {name} in the checkpoint's configuration, or remove it"
        )
    return stated


def _first_layer(shapes: Mapping[str, Shape], format: Format) -> dict[str, Shape]:
    """Return shapes of layer 0 by Megatron's names (without .weight), those of a tensor in parts put together by
    rows.
    """
    layer: dict[str, Shape] = {}
    for row in map(layer_row, all_tensors()):
        (megatron,) = row.megatron.names
        names = [name.format(layer=0) for name in row.naming(format).names]
        if names and all(name in shapes for name in names):
            rows = sum(shapes[name][0] for name in names)
            layer[megatron.partition(LAYER)[2].removesuffix(".weight")] = (rows, *shapes[names[0]][1:])
    return layer
