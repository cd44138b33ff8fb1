"""Blends of token files, in Megatron's form: prefixes, each with a weight or none with one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fanformer.data.token_files import bin_path, idx_path
from megatron_fanformer.errors import InputError

SPLIT_PATTERN = re.compile(r"\d*\.?\d+(,\d*\.?\d+){1,2}")


@dataclass(frozen=True)
class Blend:
    """Token files to draw samples from. Without weights, each counts by its size."""

    prefixes: list[str]
    weights: list[float] | None


def parse_blend(items: Sequence[str]) -> Blend:
    """Read "prefix prefix …" or "weight prefix weight prefix …", one list entry a word.

    Raises InputError for an empty list, for weights and prefixes that do not alternate, or for a weight that
    is not positive.
    """
    if not items:
        raise InputError("the list is empty: name at least one prefix of a .bin and .idx pair")
    numbers = [_number(item) for item in items]
    if numbers[0] is None:
        stray = next((item for item, number in zip(items, numbers, strict=True) if number is not None), None)
        if stray is not None and not idx_path(stray).exists():
            raise InputError(f"{stray!r} stands alone as a weight: give every prefix a weight, or none")
        return Blend(list(items), None)
    weights, prefixes = numbers[0::2], list(items[1::2])
    if len(weights) != len(prefixes) or any(weight is None for weight in weights):
        raise InputError(f"{' '.join(items)!r} does not alternate: write weight prefix weight prefix …")
    positive = [weight for weight in weights if weight is not None and weight > 0]
    if len(positive) < len(weights):
        raise InputError(f"a weight of {' '.join(items)!r} is not positive: leave such a prefix out")
    return Blend(prefixes, positive)


def _number(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def blend_problems(name: str, items: Sequence[str]) -> list[str]:
    """What is wrong with a blend, `name` being the setting that holds it; only looks at names of files."""
    try:
        blend = parse_blend(items)
    except InputError as error:
        return [f"{name}: {error}"]
    paths = [path for prefix in blend.prefixes for path in (bin_path(prefix), idx_path(prefix))]
    return [
        f"{name}: {path} does not exist: give the prefix of a .bin and .idx pair, as prepare writes it"
        for path in paths
        if not path.is_file()
    ]


def split_problems(split: str) -> list[str]:
    """What is wrong with a split such as "99,1,0" (training, validation, test)."""
    parts = [float(part) for part in split.split(",")] if SPLIT_PATTERN.fullmatch(split) else []
    if not parts or parts[0] <= 0 or parts[1] <= 0:
        return [f"data.split: {split!r} cuts off no validation part: write it as '99,1,0', training first"]
    return []
