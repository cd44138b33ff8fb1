"""p_ratio from the shapes of FAN maps: never guessed, and refused where a stated one disagrees."""

from typing import Any

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.model.config import p_ratio_of


def inferred_p_ratio(fan_rows: int, width: int, stated: float | None, name: str = "p_ratio") -> float:
    """The p_ratio of a FAN map of `fan_rows` rows whose output is `width` wide: w - P rows, since P + G = P + (w - 2P).

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
    if not _gives(stated, periodic, width):
        raise CorruptError(
            f"{name} is stated as {stated}, but the FAN map's {fan_rows} rows at hidden size {width} "
            f"are those of p_ratio {actual:g}; correct {name} in the checkpoint's configuration, or remove it"
        )
    return stated


def _gives(stated: Any, periodic: int, width: int) -> bool:
    is_number = isinstance(stated, int | float) and not isinstance(stated, bool)
    return is_number and 0 <= stated <= 1 and bool(int(stated * width) == periodic)
