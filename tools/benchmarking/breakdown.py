"""Where a step's time goes: the profiler's events, each in one category."""

import re
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

HOST = "host"
OTHER = "other"

# In this order: the first whose pattern an event, a kernel of it or anything around it matches. GEMMs of attention are
# attention; those of the loss head are matrix products.
CATEGORIES = {
    "communication": r"c10d::|gloo:|nccl|CollectiveThroughMemory",
    "attention": r"scaled_dot_product|causal_attention|flash|fmha|FusedAttn|cudnn.*sdpa",
    "matrix products": r"aten::(add|b|badd)?mm_?$|(mkl|add)_product|mkldnn_linear|gemm|nvjet|cutlass|onednn",
    "FAN activation": r"FANActivation|_fan_(activate|differentiate)",
    "loss head": r"LossHeadFunction|CrossEntropy|log_softmax|^_exponentials",
    "optimizer": r"optimizer|Optimizer\.step|multi_tensor|fused_adam",
    "norms": r"rms_?norm|RMSNorm",
    "SwiGLU": r"swiglu|SwiGLU|silu",
    "rotary embedding": r"rope|rotary|RoPE|_Rotation",
}


def breakdown(events: Any, steps: int, wall_seconds: float) -> dict[str, float]:
    """Seconds per step by category, from a profiler's events over some steps; what no event covers is the host's.

    On a GPU the time is that of kernels, which may overlap (communication with work): the sum may exceed the step.
    """
    seconds: Counter[str] = Counter()
    unclaimed: Counter[str] = Counter()
    has_kernels = ProfilerActivity.CUDA in activities()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            if not event.is_user_annotation:  # a range that spans kernels
                unclaimed[event.name] += event.time_range.elapsed_us()
        elif event.kernels:
            for kernel in event.kernels:
                seconds[category([kernel.name, *_chain(event)])] += kernel.duration / 1e6
                unclaimed[kernel.name] -= kernel.duration
        elif not has_kernels:
            seconds[category(_chain(event))] += event.self_cpu_time_total / 1e6
    for name, microseconds in unclaimed.items():  # launched by no operator of torch's, as the Engine's Adam is
        seconds[category([name])] += max(0.0, microseconds) / 1e6
    total = {name: seconds[name] / steps for name in (*CATEGORIES, OTHER) if seconds[name]}
    total[HOST] = max(0.0, wall_seconds - sum(total.values()))
    return total


def category(names: list[str]) -> str:
    """Of an event: its names, from its own outwards."""
    for name, pattern in CATEGORIES.items():
        if any(re.search(pattern, each) for each in names):
            return name
    return OTHER


def activities() -> list[ProfilerActivity]:
    """What to profile on this machine: a torch without CUDA can profile no GPU, whatever stands in for one."""
    has_kernels = torch.cuda.is_available() and ProfilerActivity.CUDA in supported_activities()
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_kernels else [])]


def _chain(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
