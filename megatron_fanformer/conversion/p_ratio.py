"""p_ratio from the shapes of FAN maps: never guessed, and refused where a stated one disagrees."""

import math

from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import p_ratio_of


def inferred_p_ratio(fan_rows: int, width: int, stated: float | None, name: str = "p_ratio") -> float:
    """The p_ratio of a FAN map of `fan_rows` rows whose output is `width` wide: w - P rows, since P + G = P + (w - 2P).

    Returns `stated` where it gives that many rows, else P / w where nothing was stated.

    Raises:
        CorruptError: no p_ratio gives `fan_rows` rows.
        InputError: the stated p_ratio disagrees with the weights.
    """
    periodic = width - fan_rows
    if not 0 <= periodic <= width // 2:
        raise CorruptError(
            f"the FAN map has {fan_rows} rows; at hidden size {width} it must have "
            f"{-(-width // 2)} to {width}: the weights are of another model"
        )
    actual = p_ratio_of(periodic, width)
    if stated is None:
        return actual
    if not math.isfinite(stated) or int(stated * width) != periodic:
        raise InputError(
            f"{name} is stated as {stated}, but the FAN map's {fan_rows} rows at hidden size {width} "
            f"are those of p_ratio {actual:g}: correct the stated one, or leave it out"
        )
    return stated
