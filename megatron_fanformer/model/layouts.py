"""Layouts as a user writes them: "tp=2,pp=2,sp=true"."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.configuration import value_problems, yaml_value
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import KernelsConfig, TransformerImpl
from megatron_fanformer.model.layout_rules import graph_problems
from megatron_fanformer.runtime.layout import ParallelConfig

SINGLE = "one process"

SHORT_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "sp": "sequence_parallel",
    "fan": "fan_form",
    "distributed_optimizer": "use_distributed_optimizer",
    "recompute": "recompute_granularity",
}
COMMA_BETWEEN_ITEMS = re.compile(r",(?![^\[]*\])")  # no comma inside a list
OVERLAP_FIELDS = ("overlap_grad_reduce", "overlap_param_gather")  # `overlap` sets both


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, and what computes its layers."""

    parallel: ParallelConfig
    kernels: KernelsConfig

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallel.model_parallel_size * (self.parallel.data_parallel_size or 1)

    def problems(self) -> list[str]:
        """Return the rules that the layout breaks for any model, one line each."""
        return [*self.parallel.problems(), *self.kernels.problems(), *graph_problems(self.parallel, self.kernels)]


def single_process(transformer_impl: TransformerImpl = "auto") -> Layout:
    """Return the layout on one rank, without overlap or recomputation."""
    parallel = ParallelConfig(use_distributed_optimizer=False, data_parallel_size=1)
    return Layout(parallel, KernelsConfig(transformer_impl=transformer_impl))


def parse_layout(text: str, transformer_impl: TransformerImpl = "auto") -> Layout:
    """Return the layout that `text` describes; fields that `text` does not name are as in `single_process`.

    Names are those of `parallel` and `kernels` in a configuration, or `SHORT_NAMES`, or `overlap` for both overlaps.
    Raises InputError, naming the text, if it cannot be read or breaks a rule.
    """
    layout = replace_fields(single_process(transformer_impl), layout_fields(text), text)
    if problems := layout.problems():
        raise InputError("\n".join(f"layout {text!r}: {problem}" for problem in problems))
    return layout


def replace_fields(base: Layout, fields: Mapping[str, Any], text: str) -> Layout:
    """Return `base` with these values, which were read in `text`; raises InputError if one has a wrong type."""
    kernel_names = {field.name for field in dataclasses.fields(KernelsConfig)}
    kernels = {name: value for name, value in fields.items() if name in kernel_names}
    parallel = {name: value for name, value in fields.items() if name not in kernels}
    if problems := [*value_problems(parallel, ParallelConfig), *value_problems(kernels, KernelsConfig)]:
        raise InputError("\n".join(f"layout {text!r}: {problem}" for problem in problems))
    return Layout(dataclasses.replace(base.parallel, **parallel), dataclasses.replace(base.kernels, **kernels))


def layout_fields(text: str) -> dict[str, Any]:
    """Return the values that a layout's text states or implies, by the long names of their fields."""
    fields: dict[str, Any] = {}
    for item in filter(None, COMMA_BETWEEN_ITEMS.split(text.replace(" ", ""))):
        name, equals_sign, value = item.partition("=")
        if not equals_sign:
            raise InputError(f"layout {text!r}: {item!r} has no value; write it as in tp=2,sp=true")
        names = OVERLAP_FIELDS if name == "overlap" else (SHORT_NAMES.get(name, name),)
        try:
            fields.update(dict.fromkeys(names, yaml_value(value)))
        except ValueError:
            raise InputError(f"layout {text!r}: {value!r} is not a value; write it as in tp=2,sp=true") from None
    if "recompute_granularity" in fields:
        is_full = fields["recompute_granularity"] == "full"
        implied = {"recompute_method": "uniform" if is_full else None, "recompute_num_layers": 1 if is_full else None}
        fields = implied | fields  # the text's values replace the implied ones
    return fields


def configured_layout(parallel: ParallelConfig, kernels: KernelsConfig) -> tuple[str, Layout]:
    """Return the configured layout's text, without fields that are None or as in `single_process`, and the layout."""
    single = single_process(kernels.transformer_impl)
    sections: tuple[tuple[Any, Any], ...] = ((parallel, single.parallel), (kernels, single.kernels))
    stated = {
        field.name: getattr(section, field.name)
        for section, plain in sections
        for field in dataclasses.fields(section)
        if getattr(section, field.name) not in (None, getattr(plain, field.name))
    }
    resolved = dataclasses.replace(parallel, data_parallel_size=parallel.data_parallel_size or 1)
    return layout_text(stated) or SINGLE, Layout(resolved, kernels)


def layout_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a layout with these values, under short names."""
    short_names = {long: short for short, long in SHORT_NAMES.items()}
    return ",".join(f"{short_names.get(name, name)}={_value_text(value)}" for name, value in fields.items())


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    # In a pipeline_model_parallel_layout, commas and blanks mean nothing; here they would separate items.
    return re.sub(r"[,\s]", "", str(value))
