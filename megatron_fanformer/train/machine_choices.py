"""Fields that a configuration leaves to the machine: what each becomes, and why; reported at a run's start."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_fanformer.model.layer_spec import (
    chosen_engine_attention,
    resolve_transformer_impl,
    transformer_engine_problem,
)
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig

LINE_WIDTH = 80


class Choice(NamedTuple):
    """The value of one field that the user left open."""

    section: str
    field: str
    value: Any
    reason: str
    notify_user: bool = True
    """False where it simply follows from the device being a CPU: then only the log file has it."""


def choose_for_machine(config: RunConfig, grid: RankGrid) -> tuple[RunConfig, list[Choice]]:
    """Return the configuration with its open fields filled in for this machine, and the choices.

    Raises:
        InputError: Transformer Engine is requested and cannot be used.
    """
    choices = list(_choices(config, grid))
    for section in ("parallel", "kernels", "runtime", "precision", "data"):
        chosen = {choice.field: choice.value for choice in choices if choice.section == section}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **chosen)})
    return config, choices


def choice_lines(choices: list[Choice]) -> list[str]:
    """Return the notice for the user, in as few lines as it takes."""
    groups = itertools.groupby(
        [choice for choice in choices if choice.notify_user], key=lambda choice: (choice.value, choice.reason)
    )
    texts = []
    for (value, reason), alike in groups:
        shown = str(value).lower() if isinstance(value, bool) else value
        texts.append(f"{', '.join(choice.field for choice in alike)} {shown} ({reason})")
    return textwrap.wrap(f"chosen here: {'; '.join(texts)}", LINE_WIDTH, subsequent_indent="  ") if texts else []


def attention_notice(config: RunConfig, grid: RankGrid) -> str | None:
    """Return a warning if Transformer Engine's attention of a 16-bit run, in a step before, was not a fused one."""
    if grid.device != "cuda" or chosen_engine_attention() != "unfused":
        return None
    if config.kernels.attention_backend != "auto" or config.dtype(grid.device).itemsize != 2:
        return None  # configured, or the only one for float32
    return (
        "Transformer Engine has no fused attention for this run, and keeps every score: slower, and memory grows with "
        "the square of the sequence (docs/gpu.md#attention; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 say why)"
    )


def _choices(config: RunConfig, grid: RankGrid) -> Iterator[Choice]:
    kernels, runtime, parallel = config.kernels, config.runtime, config.parallel
    on_gpu = grid.device == "cuda"
    if runtime.device == "auto":
        reason = torch.cuda.get_device_name() if on_gpu else "no GPU is visible"
        yield Choice("runtime", "device", grid.device, reason)
    if config.precision.dtype == "auto":
        is_bf16 = config.dtype(grid.device) == torch.bfloat16
        reason = f"this {'GPU' if on_gpu else 'CPU'} has {'' if is_bf16 else 'no '}bf16 matrix units"
        yield Choice("precision", "dtype", "bf16" if is_bf16 else "fp32", reason)
    implementation = resolve_transformer_impl(kernels.transformer_impl)
    if kernels.transformer_impl == "auto":
        reason = "Transformer Engine's layers need a GPU"
        if on_gpu:
            problem = transformer_engine_problem()
            reason = "Transformer Engine imports" if problem is None else f"Transformer Engine: {problem}"
        yield Choice("kernels", "transformer_impl", implementation, reason, on_gpu)
    if runtime.threads_per_rank is None and not on_gpu:
        reason = "OMP_NUM_THREADS, or this machine's cores, shared by its ranks"
        yield Choice("runtime", "threads_per_rank", torch.get_num_threads(), reason)
    if runtime.cpu_kernels == "auto" and not on_gpu:
        problem = grid.cpu_kernels_problem
        chosen = ("compiled", "they are built") if problem is None else ("torch", f"slower: {problem}")
        yield Choice("runtime", "cpu_kernels", *chosen)
    if kernels.gradient_accumulation_fusion is None:
        fuses, reason = False, "neither the Engine's layers nor apex's kernel"
        if not torch.cuda.is_available():
            fuses, reason = True, "the products add to the gradients' buffer"
        elif implementation == "transformer_engine":
            fuses, reason = True, "the Engine's products add to the gradients' buffer"
        elif devices.has_fused_gradient_kernel():
            fuses, reason = True, "apex's kernel is installed"
        yield Choice("kernels", "gradient_accumulation_fusion", fuses, reason, on_gpu)
    if config.data.num_workers is None:
        yield Choice("data", "num_workers", *((2, "the GPU") if on_gpu else (0, "the CPU computes")), on_gpu)
    # Communication of gradients and weights over the replicas, those of context parallelism included.
    replicas = grid.groups.dp_cp.size()
    pays = grid.backend == "nccl" and replicas > 1
    if grid.backend == "gloo":
        reason = "over gloo it would take cores from the computation"
    elif replicas == 1:
        reason = "one replica"
    else:
        reason = f"{replicas} replicas, over NCCL"
    reduces, gathers = parallel.overlaps(pays=pays)
    if parallel.overlap_grad_reduce is None:
        yield Choice("parallel", "overlap_grad_reduce", reduces, reason, on_gpu)
    if parallel.overlap_param_gather is None:
        if pays and not gathers:
            reason = "it needs overlap_grad_reduce and use_distributed_optimizer"
        yield Choice("parallel", "overlap_param_gather", gathers, reason, on_gpu)
