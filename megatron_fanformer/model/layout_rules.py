"""The rules between a layout and a model, kernels or a batch; a message names the nearest legal value if there is one.

A function returns or yields one line for each broken rule.
"""

import math
from collections.abc import Iterator

from megatron_fanformer.model.config import FANformerConfig, KernelsConfig, nearest_p_ratio
from megatron_fanformer.runtime.layout import ParallelConfig


def layout_problems(model: FANformerConfig, parallel: ParallelConfig) -> list[str]:
    """Return why a model cannot have this layout."""
    return [
        *_tensor_problems(model, parallel.tensor_model_parallel_size),
        *_fan_problems(model, parallel),
        *_pipeline_problems(model, parallel),
        *_sequence_problems(model, parallel),
    ]


def _tensor_problems(model: FANformerConfig, tp_size: int) -> Iterator[str]:
    stated_size = f"parallel.tensor_model_parallel_size {tp_size}"
    heads, groups = model.num_attention_heads, model.query_groups

    def is_valid(ranks: int) -> bool:  # as a tensor parallel size that divides the query heads
        has_whole_groups = groups % ranks == 0
        # If ranks share a group, each rank makes an equal part of the group's rows of queries, keys and values.
        # megatron-core gathers these parts, but not the values that a FAN layer makes.
        can_share_groups = not model.placement.has_own_values and ranks % groups == 0 and model.qkv_rows % ranks == 0
        return has_whole_groups or can_share_groups

    valid_sizes = [ranks for ranks in divisors(heads) if is_valid(ranks)]
    if tp_size not in valid_sizes:
        group_clause = (
            "" if groups == heads else f", or not into whole or equally shared groups (model.num_query_groups {groups})"
        )
        yield (
            f"{stated_size} does not divide model.num_attention_heads {heads}{group_clause}; choose one of "
            f"{', '.join(map(str, valid_sizes))}"
        )
    for name in ("ffn_hidden_size", "padded_vocab_size"):
        if getattr(model, name) % tp_size:
            yield f"{stated_size} does not divide model.{name} {getattr(model, name)}; change one of them"


def _fan_problems(model: FANformerConfig, parallel: ParallelConfig) -> Iterator[str]:
    tp_size = parallel.tensor_model_parallel_size
    if parallel.recomputes("fan"):
        yield from fan_recompute_problems(model, tp_size)
    if parallel.fan_form == "sequence":  # every rank holds the whole map
        if model.placement.is_fanformer and not model.has_fan:  # maps, but none in front of attention
            yield (
                f"parallel.fan_form is sequence at model.fan.placement {model.fan.placement}, whose maps are always "
                "divided over the tensor parallel ranks; set it to column"
            )
        return
    for _, field, width, p_ratio in model.placement.maps(model):
        periodic = int(p_ratio * width)
        linear = width - 2 * periodic
        if periodic % tp_size == 0 and linear % tp_size == 0:
            continue
        name = "p_ratio" if getattr(model.fan, field) is None else field  # p_ratio stands in for v_p_ratio
        nearest = nearest_p_ratio(p_ratio, width, tp_size)
        remedy = (
            f"its width {width} must be a multiple of it"
            if nearest is None
            else f"the nearest valid model.fan.{name} is {nearest}"
        )
        yield (
            f"parallel.tensor_model_parallel_size {tp_size} does not divide the FAN map's {periodic} periodic and "
            f"{linear} linear rows (model.fan.{name} {p_ratio}); {remedy}"
        )


def fan_recompute_problems(model: FANformerConfig, tp_size: int) -> Iterator[str]:
    """Yield why recomputing attention's FAN map saves no memory at that tensor parallel size."""
    placement, start = model.placement, "parallel.recompute_modules has fan, but"
    if not placement.is_in_attention:
        remedy = "name mlp in its place" if placement.has_fan_mlp else "remove it"
        yield (
            f"{start} model.fan.placement is {placement.name}, so that there is no FAN map in front of attention to "
            f"recompute; {remedy}"
        )
    # On one rank: recomputation frees X_F (and g under a GELU) and keeps p | g; attention keeps the values in any case.
    frees_only_x_f = placement.has_own_values and tp_size == 1 and model.fan.activation != "gelu"
    if frees_only_x_f and model.fan_rows >= model.hidden_size:
        yield (
            f"{start} at placement {placement.name} and tensor_model_parallel_size 1 it frees X_F, {model.hidden_size} "
            f"wide, and keeps p | g of both outputs, {model.fan_rows} wide; remove it"
        )


def _pipeline_problems(model: FANformerConfig, parallel: ParallelConfig) -> Iterator[str]:
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_stages
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    layers = parallel.layers_per_stage(model.num_layers)  # None: the layers do not divide over the stages
    if parallel.pipeline_model_parallel_layout is not None:
        if layers is not None and sum(layers) != model.num_layers:
            yield (
                f"parallel.pipeline_model_parallel_layout has {sum(layers)} layers t, and model.num_layers is "
                f"{model.num_layers}; change one of them"
            )
    elif layers is None and first is None and last is None:
        most = -(-model.num_layers // stages)  # layers of every stage but the last
        rest = model.num_layers - most * (stages - 1)
        uneven = f", or set parallel.num_layers_in_last_pipeline_stage to {rest}" if rest > 0 else ""
        yield (
            f"parallel.pipeline_model_parallel_size {stages} does not divide model.num_layers {model.num_layers}; "
            f"choose one of {_divisors_of(model.num_layers)}{uneven}"
        )
    elif layers is None:
        yield (
            f"model.num_layers {model.num_layers}, less the {(first or 0) + (last or 0)} of "
            "parallel.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, do not divide over the "
            f"other stages of {stages}; change one of them"
        )
    elif 0 in layers:
        yield f"the pipeline stages have {', '.join(map(str, layers))} layers; each must have at least 1"
    elif any(count % chunks for count in layers):
        yield (
            f"parallel.virtual_pipeline_model_parallel_size {chunks} does not divide the layers of each stage, "
            f"{', '.join(map(str, layers))}; choose one of {_divisors_of(math.gcd(*layers))}"
        )
    chunk_sizes = sorted({size for sizes in parallel.segments(model.num_layers) or [] for size in sizes})
    recomputed_together = parallel.recompute_num_layers or 1
    if parallel.recompute_method == "uniform" and any(size % recomputed_together for size in chunk_sizes):
        yield (
            f"parallel.recompute_num_layers {recomputed_together} does not divide the "
            f"{', '.join(map(str, chunk_sizes))} layers of the stages' chunks, which method uniform requires; choose "
            f"one of {_divisors_of(math.gcd(*chunk_sizes))}"
        )


def _sequence_problems(model: FANformerConfig, parallel: ParallelConfig) -> Iterator[str]:
    context = parallel.context_parallel_size
    tp_size = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    # A context parallel rank holds two chunks, which sequence parallelism shards together.
    unit = math.lcm(2 * context if context > 1 else 1, context * tp_size)
    if model.seq_length % unit:
        yield (
            f"model.seq_length {model.seq_length} is not a multiple of {unit}, into which context parallel size "
            f"{context} (two chunks per rank, above 1) and sequence parallelism over {tp_size} ranks (1: none) "
            f"split it; the nearest is {max(unit, round(model.seq_length / unit) * unit)}"
        )
    heads = max(1, model.query_groups // parallel.tensor_model_parallel_size)  # a rank has at least one, shared or not
    if parallel.cp_comm_type == "a2a" and heads % context:
        yield (
            f"parallel.cp_comm_type is a2a, which deals a rank's {heads} heads of keys out to {context} context "
            "parallel ranks; choose a context parallel size that divides them, or set cp_comm_type to null (not with "
            "data.reset_attention_mask, which needs a2a)"
        )


def graph_problems(parallel: ParallelConfig, kernels: KernelsConfig) -> Iterator[str]:
    """Yield why layers cannot be replayed as CUDA graphs."""
    if kernels.cuda_graph_impl == "local" and parallel.recompute_granularity == "full":
        yield (
            "kernels.cuda_graph_impl is local with parallel.recompute_granularity full, but a layer's graph cannot be "
            "recomputed as a whole; set the former to none, or the latter to selective"
        )


def z_loss_problems(coefficient: float, kernels: KernelsConfig) -> Iterator[str]:
    """Yield why the loss cannot have a z-loss of this `training.z_loss_coefficient`."""
    if coefficient and not kernels.chunked_loss_head:
        yield (
            f"training.z_loss_coefficient is {coefficient} with kernels.chunked_loss_head false, and megatron-core's "
            "loss head has no z-loss; set the former to 0, or the latter to true"
        )


def document_problems(parallel: ParallelConfig, kernels: KernelsConfig) -> Iterator[str]:
    """Yield why attention cannot stay within documents (`data.reset_attention_mask`)."""
    if parallel.context_parallel_size > 1 and not parallel.exchanges_heads:
        yield (
            f"data.reset_attention_mask with parallel.context_parallel_size {parallel.context_parallel_size} and "
            f"cp_comm_type {parallel.cp_comm_type or 'null'}, whose chunks of a sequence may end within documents; set "
            "parallel.cp_comm_type to a2a, by which ranks attend over whole sequences"
        )
    if kernels.cuda_graph_impl == "local":
        yield (
            "data.reset_attention_mask with kernels.cuda_graph_impl local, but a graph cannot be replayed for "
            "documents of other lengths; set one of them to false or none"
        )
    if kernels.fused_single_qkv_rope:
        yield (
            "data.reset_attention_mask with kernels.fused_single_qkv_rope, which has no kernel for documents; set one "
            "of them to false"
        )


def batch_problems(
    parallel: ParallelConfig, data_parallel_size: int, global_batch_size: int, micro_batch_size: int
) -> list[str]:
    """Return why replicas cannot share a global batch or the optimizer's state; at most one line."""
    replicas = data_parallel_size * parallel.context_parallel_size
    instances = parallel.num_distributed_optimizer_instances
    if replicas % instances:
        return [
            f"parallel.num_distributed_optimizer_instances is {instances}, which does not divide data x context "
            f"parallel size, {data_parallel_size} x {parallel.context_parallel_size} = {replicas}; set it to one of "
            f"{_divisors_of(replicas)}"
        ]
    unit = micro_batch_size * data_parallel_size
    if global_batch_size % unit:
        nearest = max(unit, round(global_batch_size / unit) * unit)
        return [
            f"training.global_batch_size {global_batch_size} is not a multiple of micro batch size x data parallel "
            f"size, {micro_batch_size} x {data_parallel_size} = {unit}; the nearest is {nearest}"
        ]
    stages, micro_batches = parallel.pipeline_model_parallel_size, global_batch_size // unit
    if parallel.virtual_stages > 1 and micro_batches % stages:
        nearest = max(1, round(micro_batches / stages)) * stages * unit
        return [
            f"training.global_batch_size {global_batch_size} gives {micro_batches} micro batches, not a multiple of "
            f"parallel.pipeline_model_parallel_size {stages}, which the interleaved schedule takes at a time; the "
            f"nearest global batch size is {nearest}"
        ]
    return []


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _divisors_of(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
