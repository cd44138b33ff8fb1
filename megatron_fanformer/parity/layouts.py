"""Layouts as a user writes them: "tp=2,pp=2,sp=true"."""

import dataclasses
from typing import Any

import yaml

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.training.config_values import value_problems

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
OVERLAP = "overlap"  # short for both kinds
OVERLAPPED = ("overlap_grad_reduce", "overlap_param_gather")

RUNTIME_FIELDS = ("device", "transformer_impl", "threads_per_rank", "distributed_timeout_minutes")
"""What a layout takes over from the configuration: it is not about how the model is spread."""


def single_process(base: ParallelConfig) -> ParallelConfig:
    """One rank, with nothing spread, overlapped or recomputed."""
    kept = {name: getattr(base, name) for name in RUNTIME_FIELDS}
    return ParallelConfig(use_distributed_optimizer=False, data_parallel_size=1, **kept)


def parse_layout(text: str, base: ParallelConfig) -> ParallelConfig:
    """The layout that `text` says; what it does not say is as in one process.

    Names are those of `parallel` in a configuration, and short ones (`SHORT_NAMES`, and `overlap` for both kinds).

    Raises:
        InputError: it cannot be read, or breaks a rule of `ParallelConfig`.
    """
    fields: dict[str, Any] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, has_value, value = item.partition("=")
        if not has_value:
            raise InputError(f"layout {text!r}: {item!r} has no value; write such as tp=2,sp=true")
        names = OVERLAPPED if name == OVERLAP else (SHORT_NAMES.get(name, name),)
        fields.update(dict.fromkeys(names, _value(text, value)))
    if fields.get("recompute_granularity") == "full":
        fields = {"recompute_method": "uniform", "recompute_num_layers": 1, **fields}
    unknown = [problem.replace("parallel.", "") for problem in value_problems(fields, ParallelConfig, "parallel.")]
    layout = None if unknown else dataclasses.replace(single_process(base), **fields)
    found = unknown or (layout.problems() if layout else [])
    if found or layout is None:
        raise InputError("\n".join(f"layout {text!r}: {problem}" for problem in found))
    return layout


def _value(text: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"layout {text!r}: {value!r} is no value; write such as tp=2,sp=true") from None


def own_layout(parallel: ParallelConfig) -> tuple[str, ParallelConfig]:
    """A configuration's own layout, and how it would be written."""
    single = single_process(parallel)
    long_names = {long: short for short, long in SHORT_NAMES.items()}
    said = {
        long_names.get(field.name, field.name): getattr(parallel, field.name)
        for field in dataclasses.fields(parallel)
        if field.name not in RUNTIME_FIELDS and getattr(parallel, field.name) not in (None, getattr(single, field.name))
    }
    text = ",".join(f"{name}={_written(value)}" for name, value in said.items())
    resolved = dataclasses.replace(parallel, data_parallel_size=parallel.data_parallel_size or 1)
    return text or SINGLE, resolved


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def world_size(layout: ParallelConfig) -> int:
    """Ranks of a layout."""
    return layout.model_parallel_size * (layout.data_parallel_size or 1)
