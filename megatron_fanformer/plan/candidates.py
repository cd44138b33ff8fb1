"""Configurations in other layouts: as a user names them, and all that a search looks at.

What a layout does not name is the configuration's own, as if its fields had been overridden on the command line.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megatron_fanformer.configuration import build
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layout_rules import divisors
from megatron_fanformer.model.layouts import Layout, laid_over, layout_fields, layout_text
from megatron_fanformer.plan.flops import head_flops_per_token, layer_flops_per_token
from megatron_fanformer.plan.gradient_buffers import first_stage_buckets, first_stage_weights
from megatron_fanformer.runtime.layout import ParallelConfig, RecomputeModule
from megatron_fanformer.train.config import RunConfig, TrainingConfig
from megatron_fanformer.train.machine_rules import can_recompute_norms

MICRO_BATCH = "mbs"
DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "sequence_parallel",
    "fan_form",
)
NAMED = (
    *DEGREES,
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "cp_comm_type",
    "ddp_bucket_size",
    "recompute_granularity",
    "recompute_modules",
)
"""The fields of `parallel` that a search sets, and a layout's name shows."""
ALWAYS_WRITTEN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
FEW_BUCKETS, MANY_BUCKETS, MILLION = 4, 8, 10**6
LAYER_BY_LAYER = ("uniform", 1)  # as a layout's text means full recomputation that says no more
NOT_RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}


def laid_out(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration in the layout that `text` describes, such as `tp=8,pp=4,mbs=2`.

    Raises:
        InputError: it cannot be read.
    """
    fields = layout_fields(text)
    training = config.training
    for name in (MICRO_BATCH, "micro_batch_size"):
        if name in fields:
            values = {**dataclasses.asdict(training), "micro_batch_size": fields.pop(name)}
            try:
                training = build(values, TrainingConfig, "training.")
            except InputError as error:
                raise InputError(f"layout {text!r}: {error}") from None
    layout = laid_over(Layout(config.parallel, config.kernels), fields, text)
    return dataclasses.replace(config, parallel=layout.parallel, kernels=layout.kernels, training=training)


def layout_name(config: RunConfig, base: RunConfig) -> str:
    """Return the text that `laid_out` reads as this configuration, if it differs from `base` in its layout alone."""
    plain = type(config.parallel)()
    named: dict[str, Any] = {}
    for name in NAMED:
        value = getattr(config.parallel, name)
        if name == "recompute_modules" and config.parallel.recompute_granularity != "selective":
            continue
        if not value == getattr(plain, name) == getattr(base.parallel, name):
            named[name] = value
    layers = {name: getattr(config.parallel, name) for name in ("recompute_method", "recompute_num_layers")}
    if config.parallel.recompute_granularity == "full" and tuple(layers.values()) != LAYER_BY_LAYER:
        named |= layers
    return layout_text({**named, MICRO_BATCH: config.training.micro_batch_size})


def layout_lines(config: RunConfig, base: RunConfig) -> Iterator[str]:
    """Yield a layout as lines of a configuration: the section `parallel`, and what else differs from `base`.

    The number of replicas follows from the GPUs, and is left out.
    """
    plain = type(config.parallel)()
    yield "parallel:"
    for name, value in vars(config.parallel).items():
        if name != "data_parallel_size" and (name in ALWAYS_WRITTEN or value != getattr(plain, name)):
            yield f"  {name}: {_yaml(value)}"
    of_base = vars(base.kernels)
    if kernels := {name: value for name, value in vars(config.kernels).items() if value != of_base[name]}:
        yield from ("kernels:", *(f"  {name}: {_yaml(value)}" for name, value in kernels.items()))
    yield from ("training:", f"  micro_batch_size: {config.training.micro_batch_size}")


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]


def all_layouts(config: RunConfig, gpus: int) -> Iterator[list[RunConfig]]:
    """Yield the configuration in every layout of that many GPUs, legal or not; one list a layout, by rising micro
    batch.

    Only one of two spellings of a layout is yielded: sequence parallelism and the `sequence` form where there are
    tensor parallel ranks, chunks where there are stages whose layers they divide. Stages have equally many layers, or
    take equally long (`balanced_layouts`).
    """
    layers = config.model.num_layers
    # Attention within documents has one exchange alone.
    exchange = "a2a" if config.data.reset_attention_mask else config.parallel.cp_comm_type
    for tensor in divisors(gpus):
        for context in divisors(gpus // tensor):
            for pipeline in divisors(gpus // tensor // context):
                if pipeline > layers:
                    continue  # a stage without a layer
                replicas = gpus // (tensor * context * pipeline)
                degrees: dict[str, Any] = {
                    "tensor_model_parallel_size": tensor,
                    "context_parallel_size": context,
                    "cp_comm_type": exchange if context > 1 else None,
                    "pipeline_model_parallel_size": pipeline,
                    "num_layers_in_first_pipeline_stage": None,
                    "num_layers_in_last_pipeline_stage": None,
                    "data_parallel_size": replicas,
                }
                micro_batches = _micro_batches(config, replicas)
                for rest in _other_fields(config, dataclasses.replace(config.parallel, **degrees)):
                    parallel = dataclasses.replace(config.parallel, **degrees, **rest)
                    yield [dataclasses.replace(config, parallel=parallel, training=each) for each in micro_batches]


def _micro_batches(config: RunConfig, replicas: int) -> list[TrainingConfig]:
    """Return the section `training` for every size that a replica's samples divide into; 1 if they do not."""
    samples, rest = divmod(config.training.global_batch_size, replicas)
    sizes = [1] if rest or not samples else divisors(samples)
    return [dataclasses.replace(config.training, micro_batch_size=size) for size in sizes]


def _other_fields(config: RunConfig, degrees: ParallelConfig) -> Iterator[dict[str, Any]]:
    for stages in _stages(config.model, degrees.pipeline_model_parallel_size):
        for form in _fan_forms(config.model, degrees.tensor_model_parallel_size):
            fields = {**stages, **form}
            parallel = dataclasses.replace(degrees, **fields)
            for size in _bucket_sizes(config, parallel):
                for recomputation in recomputations(config, parallel):
                    yield {**fields, "ddp_bucket_size": size, **recomputation}


def _stages(model: FANformerConfig, pipeline: int) -> Iterator[dict[str, Any]]:
    """Yield how the layers are shared out: evenly, where they divide, in every number of chunks; and by time."""
    layers, rest = divmod(model.num_layers, pipeline)
    for number in divisors(layers) if pipeline > 1 and not rest else [1]:
        chunks = number if number > 1 else None
        yield {"virtual_pipeline_model_parallel_size": chunks, "pipeline_model_parallel_layout": None}
    for text in balanced_layouts(model, pipeline) if pipeline > 1 else ():
        yield {"virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": text}


def _bucket_sizes(config: RunConfig, parallel: ParallelConfig) -> list[int | None]:
    """Return the configuration's own; and where it leaves that open and would have few buckets, a size that gives about
    eight.

    All buckets but one are communicated beside the computation; their default size grows with the replicas.
    """
    replicas = parallel.data_parallel_size or 1
    pays = config.runtime.device != "cpu" and replicas * parallel.context_parallel_size > 1
    reduces, _ = parallel.overlaps(pays=pays)
    own = parallel.ddp_bucket_size
    if own is not None or not reduces:
        return [own]
    layers = (parallel.layers_per_stage(config.model.num_layers) or [0])[0]
    elements = sum(weight.elements for weight in first_stage_weights(config.model, parallel, layers))
    size = round(elements / MANY_BUCKETS / MILLION) * MILLION
    resolved = dataclasses.replace(parallel, overlap_grad_reduce=True)
    if not size or first_stage_buckets(config.model, resolved, replicas, layers) >= FEW_BUCKETS:
        return [own]
    return [own, size]


def _fan_forms(model: FANformerConfig, tensor: int) -> list[Mapping[str, Any]]:
    plain = {"sequence_parallel": False, "fan_form": "column"}
    if tensor == 1:
        return [plain]
    sharded = [{"sequence_parallel": True, "fan_form": form} for form in ("column", "sequence")]
    return [plain, *sharded[: 2 if model.has_fan else 1]]


def recomputations(config: RunConfig, parallel: ParallelConfig) -> list[Mapping[str, Any]]:
    """List recomputation settings of a layout, from none to all: nothing, what costs no matrix product, the MLP too,
    layers.

    A configuration's own modules, where it recomputes selectively, take the place of the two in the middle.
    """
    # Without a matrix product; norms only where they are apart: the Engine fuses all but the input norm of the
    # `sequence` form.
    cheap: list[RecomputeModule] = []
    is_apart = config.kernels.transformer_impl == "local" or parallel.fan_form == "sequence"
    if is_apart and can_recompute_norms(config.precision):
        cheap.append("layernorm")
    refused = config.model.placement.recompute_problems(config.model, parallel.tensor_model_parallel_size)
    if config.model.has_fan and not any(refused):
        cheap.append("fan")
    modules: list[list[RecomputeModule]] = [*filter(None, [cheap]), [*cheap, "mlp"]]
    if config.parallel.recompute_granularity == "selective":
        modules = [config.parallel.recompute_modules]
    selective = [
        {**NOT_RECOMPUTED, "recompute_granularity": "selective", "recompute_modules": each} for each in modules
    ]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [NOT_RECOMPUTED, *selective, full]


# -- stages that take equally long


def balanced_layouts(model: FANformerConfig, stages: int) -> Iterator[str]:
    """Yield a `pipeline_model_parallel_layout` for each number of chunks that divides the most layers of a stage.

    Layers and the loss head, which counts as layers by its FLOPs, are shared out evenly. Where that leaves chunks with
    one layer less, the first is one of them: it has the embedding. Even layouts are left out.
    """
    head = round(head_flops_per_token(model) / layer_flops_per_token(model))
    units = model.num_layers + head
    for chunks in divisors(-(-units // stages)):
        each, more = divmod(units, stages * chunks)
        layers = [each + (1 <= place <= more) for place in range(stages * chunks)]
        layers[-1] -= head
        if layers[-1] >= 0 and all(layers[1:-1]) and len(set(layers)) > 1:
            yield _text(layers)


def _text(layers: list[int]) -> str:
    """Return the shortest text with equal neighbors as a repeated group."""
    first, *middle, last = layers
    parts = [f"E{_layers(first)}"]
    while middle:
        alike = next((place for place, number in enumerate(middle) if number != middle[0]), len(middle))
        chunk = _layers(middle[0])
        parts.append(f"({chunk}|)*{alike}" if alike > 1 else f"{chunk}|")
        middle = middle[alike:]
    return f"{parts[0]}|{''.join(parts[1:])}{_layers(last)}L"


def _layers(number: int) -> str:
    return "t" * number if number < 4 else f"t*{number}"
