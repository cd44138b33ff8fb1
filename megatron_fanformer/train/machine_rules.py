"""Rules that a configuration breaks on this machine, each with its remedy.

The rules that need no machine are checked before: they need no torch, which takes seconds to import.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.fp8_rules import fp8_machine_problems
from megatron_fanformer.train.loggers.registry import logger_problems

if TYPE_CHECKING:
    import torch


def machine_problems(config: RunConfig) -> list[str]:
    """Return what keeps this machine from running a configuration, one line each."""
    try:
        device = devices.resolve_device(config.runtime.device)
    except InputError as error:
        return [str(error)]
    return [
        *kernel_problems(config.kernels),
        *engine_problems(config.model, config.parallel, config.kernels, config.dtype(device)),
        *backend_problems(config.parallel, config.kernels, config.runtime.backend(device), device),
        *fp8_machine_problems(config.precision, device),
        *logger_problems(config.logging),
    ]


def backend_problems(
    parallel: ParallelConfig, kernels: KernelsConfig, backend: str, device: devices.DeviceKind
) -> list[str]:
    """Return what ranks on that device cannot send each other, one line each."""
    if device == "cpu" and backend == "nccl":
        return [
            "runtime.distributed_backend is nccl, but this run is on the CPU, where ranks have gloo; set it to null"
        ]
    if device != "cuda" or backend != "gloo":
        return []
    problems = [
        f"runtime.distributed_backend is gloo, which sends no tensor from one GPU rank to another, and {what}"
        for what in _sends(parallel, kernels)
    ]
    if parallel.overlap_grad_reduce:
        problems.append(
            "parallel.overlap_grad_reduce is true over gloo, which reduces no GPU's gradients meanwhile; set it and "
            "overlap_param_gather to null, or runtime.distributed_backend"
        )
    return problems


def _sends(parallel: ParallelConfig, kernels: KernelsConfig) -> Iterator[str]:
    """Return what is sent from rank to rank, and the remedy. gloo's collectives do take GPU tensors."""
    if parallel.pipeline_model_parallel_size > 1:
        yield "pipeline stages do; set it to null, or parallel.pipeline_model_parallel_size to 1"
    if parallel.context_parallel_size > 1 and has_engine(kernels) and parallel.cp_comm_type in (None, "p2p"):
        yield (
            "Transformer Engine's attention exchanges keys and values so; set it to null, or parallel.cp_comm_type to "
            "all_gather"
        )


def kernel_problems(kernels: KernelsConfig) -> Iterator[str]:
    """Yield what keeps this machine from the configured kernels, one line each."""
    has_fused_gradients = has_engine(kernels) or devices.has_fused_gradient_kernel()
    if kernels.gradient_accumulation_fusion and not has_fused_gradients:
        yield (
            "kernels.gradient_accumulation_fusion is true, but there is no GPU with Transformer Engine's layers, and "
            "apex's fused_weight_gradient_mlp_cuda does not import; set it to null"
        )
    if kernels.cuda_graph_impl == "local" and devices.resolve_device("auto") == "cpu":
        yield "kernels.cuda_graph_impl is local, but there is no GPU; set it to none"
    backend = kernels.attention_backend
    for name, value in devices.attention_switches().items():  # megatron-core sets them, and refuses other values
        if value != ("1" if backend in ("auto", devices.ATTENTION_SWITCHES[name]) else "0"):
            yield (
                f"{name} is {value} in the environment, but kernels.attention_backend is {backend}; unset it, and "
                "choose by that field"
            )


def has_engine(kernels: KernelsConfig) -> bool:
    """Return whether the layers are Transformer Engine's here."""
    return kernels.transformer_impl != "local" and devices.has_transformer_engine()


def engine_problems(
    model: FANformerConfig, parallel: ParallelConfig, kernels: KernelsConfig, dtype: "torch.dtype"
) -> Iterator[str]:
    """Yield what the layers that this machine has, the Engine's or local ones, cannot compute, one line each."""
    number_format = str(dtype).removeprefix("torch.")
    return layer_problems(model, parallel, kernels, with_engine=has_engine(kernels), in_fp32=number_format == "float32")


def layer_problems(
    model: FANformerConfig, parallel: ParallelConfig, kernels: KernelsConfig, *, with_engine: bool, in_fp32: bool
) -> Iterator[str]:
    """Yield what the Engine's layers, or the local ones, cannot compute, one line each."""
    return _engine_problems(model, parallel, kernels, in_fp32) if with_engine else _local_problems(parallel, kernels)


def _local_problems(parallel: ParallelConfig, kernels: KernelsConfig) -> Iterator[str]:
    if parallel.cp_comm_type == "p2p":
        yield (
            "parallel.cp_comm_type is p2p, which is Transformer Engine's, but the layers here are local ones, which "
            "gather keys and values; set it to null"
        )
    if kernels.fused_single_qkv_rope:
        yield (
            "kernels.fused_single_qkv_rope is true, but its kernel is Transformer Engine's, whose layers are not "
            "in use here; set it to false"
        )


def _engine_problems(
    model: FANformerConfig, parallel: ParallelConfig, kernels: KernelsConfig, in_fp32: bool
) -> Iterator[str]:
    if not model.placement.has_engine_layers:
        yield (
            f"model.fan.placement is {model.fan.placement}, whose FAN layers are local ones alone, but the layers here "
            "are Transformer Engine's; set kernels.transformer_impl to local"
        )
    size = parallel.context_parallel_size
    if size > 1 and in_fp32 and not parallel.exchanges_heads:
        yield (
            f"parallel.context_parallel_size is {size} in float32, but Transformer Engine's attention over context "
            "parallel ranks is of 16 bits alone; set the dtype to bf16, parallel.cp_comm_type to a2a, or "
            "kernels.transformer_impl to local"
        )
    if kernels.fused_single_qkv_rope and model.placement.has_own_values:
        yield (
            f"kernels.fused_single_qkv_rope is true at model.fan.placement {model.fan.placement}, whose values are in "
            "another tensor than queries and keys; set it to false"
        )
    elif kernels.fused_single_qkv_rope and model.query_groups < parallel.tensor_model_parallel_size:
        yield (
            f"kernels.fused_single_qkv_rope is true with {model.query_groups} query groups over "
            f"parallel.tensor_model_parallel_size {parallel.tensor_model_parallel_size}, but ranks that share a group "
            "would each rotate all of its queries; set it to false"
        )
    if kernels.fused_single_qkv_rope and model.qk_layernorm:
        yield (
            "kernels.fused_single_qkv_rope is true with model.qk_layernorm, but its kernel has no norm between QKV and "
            "rotary positions; set one of them to false"
        )
