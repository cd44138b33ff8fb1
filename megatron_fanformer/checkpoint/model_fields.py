"""Whether a model's configuration that was read from a checkpoint holds values that a model can have.

Files state whatever they like: a word for a size, a size that no memory holds, a number of layers that takes a year to
count. What the sizes have to do with each other is FANformerConfig's own to say.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_fanformer.model.config import FANformerConfig

LARGEST = 1 << 30  # so that a tensor's bytes fit into 64 bits


def wrong_fields(config: FANformerConfig) -> list[str]:
    """Fields whose values are of another type, or beyond any model; else what else `config.problems` says."""
    return list(_wrong_types("model", config)) or config.problems()


def _wrong_types(path: str, config: Any) -> Iterator[str]:
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{path}.{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(hints[field.name]) and dataclasses.is_dataclass(value):
            yield from _wrong_types(name, value)
        elif not _fits(value, hints[field.name]):
            yield f"{name} is {value!r:.40}, which no model has"


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value is known or (isinstance(value, str) and value == known) for known in get_args(hint))
    if choices := get_args(hint):
        return any(_fits(value, choice) for choice in choices)
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST
    return isinstance(value, hint)
