"""Rules that FP8 products set for models, batches and machines: each broken one with its remedy."""

from collections.abc import Iterator

from megatron_fanformer.model.config import FANformerConfig, PrecisionConfig
from megatron_fanformer.model.kernels import DEFAULT_KERNELS, KernelsConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import ParallelConfig

# What both sides of a product's matrices must be multiples of on one rank: megatron-core's own alignment.
MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def fp8_problems(
    model: FANformerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    micro_batch_size: int,
    kernels: KernelsConfig = DEFAULT_KERNELS,
) -> Iterator[str]:
    """Yield what keeps a model's products from being in FP8, one line each; nothing without FP8."""
    if precision.fp8 is None:
        return
    multiple = MULTIPLE[precision.fp8_recipe]
    for name, size in _sizes(model, parallel, precision, micro_batch_size):
        if size % multiple:
            yield (
                f"{name} is {size}, but precision.fp8 needs multiples of {multiple} on a rank (recipe "
                f"{precision.fp8_recipe}); change it, or set precision.fp8 to null"
            )
    if kernels.transformer_impl == "local":
        yield (
            f"precision.fp8 is {precision.fp8} with kernels.transformer_impl local, whose layers have no FP8; set the "
            "latter to auto"
        )
    if parallel.recomputes("layernorm") and not can_recompute_norms(precision):
        yield (
            "parallel.recompute_modules has layernorm, which cannot be recomputed with precision.fp8_recipe delayed; "
            "remove it, or choose the recipe tensorwise"
        )
    layers = model.num_layers // parallel.pipeline_model_parallel_size
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if precision.first_last_layers_bf16 and getattr(precision, name) > layers:
            yield f"precision.{name} is {getattr(precision, name)}, but a pipeline stage has {layers} layers; lower it"


def can_recompute_norms(precision: PrecisionConfig) -> bool:
    """Return whether norms can be recomputed: megatron-core refuses it where the scales would be updated twice."""
    return precision.fp8 is None or precision.fp8_recipe != "delayed"


def _sizes(
    model: FANformerConfig, parallel: ParallelConfig, precision: PrecisionConfig, micro_batch_size: int
) -> Iterator[tuple[str, int]]:
    """Both dimensions of every product on one rank, in the user's words."""
    tensor = parallel.tensor_model_parallel_size
    share = f" / tensor parallel size {tensor}" if tensor > 1 else ""
    yield "model.hidden_size", model.hidden_size
    yield f"model.ffn_hidden_size{share}", model.ffn_hidden_size // tensor
    yield f"the width of the attention heads{share}", model.num_attention_heads * model.kv_channels // tensor
    yield f"the width of queries, keys and values{share}", model.qkv_rows // tensor
    if precision.fp8_fan and model.has_fan:
        is_whole = parallel.fan_form == "sequence"
        yield f"the rows of the FAN map{'' if is_whole else share}", model.fan_rows // (1 if is_whole else tensor)
    ranks = parallel.context_parallel_size * (tensor if parallel.sequence_parallel else 1)
    yield "a micro batch's number of tokens", micro_batch_size * model.seq_length // ranks


def fp8_machine_problems(precision: PrecisionConfig, device: devices.DeviceKind) -> list[str]:
    """Return what keeps this machine from FP8 products, one line each; empty without FP8."""
    if precision.fp8 is None:
        return []
    remedy = "set it to null"
    if device == "cpu":
        return [f"precision.fp8 is {precision.fp8}, but FP8 products need a GPU, and this run is on the CPU; {remedy}"]
    problems = []
    if problem := devices.fp8_problem(precision.fp8_recipe):
        problems.append(
            f"precision.fp8 is {precision.fp8} with recipe {precision.fp8_recipe}, but {problem}; "
            f"choose another precision.fp8_recipe, or {remedy}"
        )
    if not devices.has_transformer_engine():
        problems.append(
            f"precision.fp8 is {precision.fp8}, but Transformer Engine is not installed; install "
            f"megatron_fanformer[gpu], or {remedy}"
        )
    return problems
