"""Rules for models, layouts and kernels that depend on the machine, each with its remedy; imports no torch.

`machine_problems` in `preflight.py` applies them to this machine.
"""

from collections.abc import Iterator

from megatron_fanformer.model.config import DEFAULT_KERNELS, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import ParallelConfig

FP8_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""For each recipe, both sides of every matrix that a rank multiplies must be divisible by this number."""


def has_engine(kernels: KernelsConfig) -> bool:
    """Return whether this machine computes the layers with Transformer Engine."""
    return kernels.transformer_impl != "local" and devices.has_transformer_engine()


def backend_problems(
    parallel: ParallelConfig, kernels: KernelsConfig, backend: str, device: devices.DeviceKind
) -> Iterator[str]:
    """Yield the problems of a layout whose ranks cannot exchange tensors over this backend, one line each."""
    if device == "cpu" and backend == "nccl":
        yield "runtime.distributed_backend is nccl, but this run is on the CPU, where ranks have gloo; set it to null"
    if device == "cpu" or backend != "gloo":
        return
    # gloo's collectives accept tensors on GPUs; sending from one rank to another does not.
    rule = "runtime.distributed_backend is gloo, which sends no tensor from one GPU rank to another, and"
    if parallel.pipeline_model_parallel_size > 1:
        yield f"{rule} pipeline stages do; set it to null, or parallel.pipeline_model_parallel_size to 1"
    if parallel.context_parallel_size > 1 and has_engine(kernels) and parallel.cp_comm_type in (None, "p2p"):
        yield (
            f"{rule} Transformer Engine's attention sends keys and values; set it to null, or "
            "parallel.cp_comm_type to all_gather"
        )
    if parallel.overlap_grad_reduce:
        yield (
            "parallel.overlap_grad_reduce is true over gloo, which cannot reduce gradients while a GPU computes; set "
            "it and overlap_param_gather to null, or runtime.distributed_backend"
        )


def kernel_problems(kernels: KernelsConfig) -> Iterator[str]:
    """Yield a line for each configured kernel that this machine lacks."""
    has_fused_gradients = has_engine(kernels) or devices.has_fused_gradient_kernel()
    if kernels.gradient_accumulation_fusion and not has_fused_gradients:
        yield (
            "kernels.gradient_accumulation_fusion is true, but there is no GPU with Transformer Engine's layers, and "
            "apex's fused_weight_gradient_mlp_cuda does not import; set it to null"
        )
    if kernels.cuda_graph_impl == "local" and devices.resolve_device("auto") == "cpu":
        yield "kernels.cuda_graph_impl is local, but there is no GPU; set it to none"


def layer_problems(
    model: FANformerConfig, parallel: ParallelConfig, kernels: KernelsConfig, *, uses_engine: bool, in_fp32: bool
) -> Iterator[str]:
    """Yield a line for each setting that the layers in use, Transformer Engine's or local ones, cannot compute."""
    if kernels.fused_single_qkv_rope and (reason := _rope_problem(model, parallel, uses_engine=uses_engine)):
        yield f"kernels.fused_single_qkv_rope is true, but {reason}; set it to false"
    if not uses_engine:
        if parallel.cp_comm_type == "p2p":
            yield (
                "parallel.cp_comm_type is p2p, which is Transformer Engine's, but the layers here are local ones, "
                "which gather keys and values; set it to null"
            )
        return
    if not model.placement.has_engine_layers:
        yield (
            f"model.fan.placement is {model.fan.placement}, whose FAN layers exist only as local ones, but the layers "
            "here are Transformer Engine's; set kernels.transformer_impl to local"
        )
    size = parallel.context_parallel_size
    if size > 1 and in_fp32 and not parallel.exchanges_heads:
        yield (
            f"parallel.context_parallel_size is {size} in float32, but Transformer Engine's attention over context "
            "parallel ranks needs 16 bits; set the dtype to bf16, parallel.cp_comm_type to a2a, or "
            "kernels.transformer_impl to local"
        )


def _rope_problem(model: FANformerConfig, parallel: ParallelConfig, *, uses_engine: bool) -> str | None:
    """Return the reason why the fused kernel for QKV and rotary positions cannot be used; None if it can."""
    ranks = parallel.tensor_model_parallel_size
    if not uses_engine:
        return "its kernel is Transformer Engine's, whose layers are not in use here"
    if model.qk_layernorm:
        return "its kernel has no norm between QKV and rotary positions, as model.qk_layernorm asks"
    if model.placement.has_own_values:
        return f"at model.fan.placement {model.fan.placement} values are in another tensor than queries and keys"
    if model.query_groups < ranks:  # each rank would rotate all queries of its group
        return f"its {model.query_groups} query groups are shared by parallel.tensor_model_parallel_size {ranks} ranks"
    return None


# -- FP8


def fp8_problems(
    model: FANformerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    micro_batch_size: int,
    kernels: KernelsConfig = DEFAULT_KERNELS,
) -> Iterator[str]:
    """Yield the rules of FP8 that a model breaks, one line each; none if `precision.fp8` is null."""
    if precision.fp8 is None:
        return
    multiple = FP8_MULTIPLE[precision.fp8_recipe]
    for name, size in _product_sizes(model, parallel, precision, micro_batch_size):
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


def can_recompute_norms(precision: PrecisionConfig) -> bool:
    """Return whether norms can be recomputed: megatron-core refuses it if FP8 scales would be updated twice."""
    return precision.fp8 is None or precision.fp8_recipe != "delayed"


def _product_sizes(
    model: FANformerConfig, parallel: ParallelConfig, precision: PrecisionConfig, micro_batch_size: int
) -> Iterator[tuple[str, int]]:
    """Yield a description and the size of each dimension of the matrices that one rank multiplies in FP8."""
    ranks = parallel.tensor_model_parallel_size
    share = f" / tensor parallel size {ranks}" if ranks > 1 else ""
    yield "model.hidden_size", model.hidden_size
    yield f"model.ffn_hidden_size{share}", model.ffn_hidden_size // ranks
    yield f"the width of the attention heads{share}", model.num_attention_heads * model.kv_channels // ranks
    yield f"the width of queries, keys and values{share}", model.qkv_rows // ranks
    if precision.fp8_fan and model.has_fan:
        is_whole = parallel.fan_form == "sequence"  # each rank then has all rows of the map
        yield f"the rows of the FAN map{'' if is_whole else share}", model.fan_rows // (1 if is_whole else ranks)
    sequence_parts = parallel.context_parallel_size * (ranks if parallel.sequence_parallel else 1)
    yield "a micro batch's number of tokens", micro_batch_size * model.seq_length // sequence_parts


def fp8_machine_problems(precision: PrecisionConfig, device: devices.DeviceKind) -> Iterator[str]:
    """Yield the reasons why this machine cannot compute in FP8, one line each; none if `precision.fp8` is null."""
    if precision.fp8 is None:
        return
    if device == "cpu":
        yield (
            f"precision.fp8 is {precision.fp8}, but FP8 products need a GPU, and this run is on the CPU; set it to null"
        )
        return
    if problem := devices.fp8_problem(precision.fp8_recipe):
        yield (
            f"precision.fp8 is {precision.fp8} with recipe {precision.fp8_recipe}, but {problem}; "
            "choose another precision.fp8_recipe, or set it to null"
        )
    if not devices.has_transformer_engine():
        yield (
            f"precision.fp8 is {precision.fp8}, but Transformer Engine is not installed; install "
            "megatron_fanformer[gpu], or set it to null"
        )
