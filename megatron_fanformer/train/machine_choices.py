"""Resolves the fields that a configuration leaves to the machine."""

import dataclasses
from typing import Any

import torch

from megatron_fanformer.configuration import flatten
from megatron_fanformer.model.layer_spec import (
    chosen_engine_attention,
    resolve_transformer_impl,
    transformer_engine_problem,
)
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig


def choose_for_machine(config: RunConfig, grid: RankGrid) -> tuple[RunConfig, list[str]]:
    """Return the configuration with fields that are null or `auto` resolved for this machine, and notices for the user.

    Raises:
        InputError: Transformer Engine is requested and cannot be used.
    """
    on_gpu = grid.device == "cuda"
    implementation = resolve_transformer_impl(config.kernels.transformer_impl)
    is_engine = implementation == "transformer_engine"
    # Overlapping communication with computation is faster if there are replicas (context parallel ranks count, too).
    # Over gloo it is not, because gloo takes CPU cores from the computation.
    is_faster = grid.backend == "nccl" and grid.groups.dp_cp.size() > 1
    overlaps_reduce, overlaps_gather = config.parallel.resolved_overlaps(is_faster=is_faster)
    values: dict[str, Any] = {
        "runtime.device": grid.device,
        "precision.dtype": "bf16" if config.dtype(grid.device) == torch.bfloat16 else "fp32",
        "kernels.transformer_impl": implementation,
        # Without a GPU, our layers accumulate weight gradients in the buffer, too.
        "kernels.gradient_accumulation_fusion": (
            not torch.cuda.is_available() or is_engine or devices.has_fused_gradient_kernel()
        ),
        "data.num_workers": 2 if on_gpu else 0,
        "parallel.data_parallel_size": grid.data_parallel_size,
        "parallel.overlap_grad_reduce": overlaps_reduce,
        "parallel.overlap_param_gather": overlaps_gather,
    }
    if not on_gpu:
        values["runtime.threads_per_rank"] = torch.get_num_threads()
        values["runtime.cpu_kernels"] = "compiled" if grid.cpu_kernels_problem is None else "torch"
    stated = flatten(config.as_dict())
    chosen = {name: value for name, value in values.items() if stated[name] in (None, "auto")}
    for name, value in chosen.items():
        section, _, field = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    notices = [f"chosen here: {', '.join(f'{name} {value}' for name, value in chosen.items())}"] if chosen else []
    if on_gpu and "kernels.transformer_impl" in chosen and not is_engine:
        notices.append(f"the layers are not Transformer Engine's: {transformer_engine_problem()}")
    if chosen.get("runtime.cpu_kernels") == "torch":
        notices.append(f"the CPU kernels are torch's, which are slower: {grid.cpu_kernels_problem}")
    return config, notices


def attention_notice(config: RunConfig, grid: RankGrid) -> str | None:
    """Return a warning if Transformer Engine has computed a 16-bit step with its unfused attention."""
    if grid.device != "cuda" or chosen_engine_attention() != "unfused":
        return None
    if config.kernels.attention_backend != "auto" or config.dtype(grid.device).itemsize != 2:
        return None  # the user has chosen the backend, or in float32 there is no other
    return (
        "Transformer Engine has no fused attention for this run, and keeps every score: slower, and memory grows with "
        "the square of the sequence (docs/gpu.md#attention; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 say why)"
    )
