"""Measures this machine as `plan.machines` describes machines, with the shapes of a model."""

import contextlib
import dataclasses
import functools
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from benchmarking.matrix_rate import REPEATS, timed
from benchmarking.ranks import ranks_of, run_values, write_tokens
from torch import multiprocessing

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.ops.attention import attention
from megatron_fanformer.ops.element_wise import swiglu
from megatron_fanformer.plan.machines import build_machine, known_machines
from megatron_fanformer.plan.step_time import FLASH_BACKWARD, step_time
from megatron_fanformer.train.config import config_from_dict

USUAL_GPU = "h100"
LARGEST_SUM, SUMS = 32 << 20, 5  # bytes; times
NARROW = FANformerConfig(
    num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, vocab_size=64, seq_length=16
)
NARROW_LAYERS = 2, 10
NARROW_STEPS = 20


def measured_machine(
    model: FANformerConfig, micro_batch_size: int, dtype: torch.dtype, product_rate: float, device: torch.device
) -> dict[str, Any]:
    """Return the values of a machine file: rates measured here; the others are those of the most similar known machine.

    Args:
        product_rate: the mean FLOP/s of the model's products.
    """
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    measured = {
        f"{short}_flops_per_second": product_rate,
        "product_efficiency": 1.0,
        "attention_efficiency": min(1.0, _attention_rate(model, micro_batch_size, dtype, device) / product_rate),
        "memory_bytes_per_second": _memory_rate(model, micro_batch_size, dtype, device),
        "memory_efficiency": 1.0,
        "relative_error": 0.0,  # unknown: the report has the error of each case
    }
    if device.type == "cpu":
        return {**_cpu(), **_host(short), **measured, "sources": [f"measured by tools/bench_train.py, in {short}"]}
    name = torch.cuda.get_device_name(device)
    like = next((known for known in known_machines() if known in name.lower()), USUAL_GPU)
    sources = [
        f"rates of products, attention and memory: tools/bench_train.py, in {short}",
        f"the rest: that of {like}",
    ]
    return {"like": like, "name": f"{name}, measured", **measured, "sources": sources}


@functools.cache
def _cpu() -> dict[str, Any]:
    """Return the values that are constant over rounds, for a CPU: memory, collectives of two ranks, links."""
    with tempfile.TemporaryDirectory(prefix="sums-") as folder:
        multiprocessing.spawn(_time_sums, args=(folder,), nprocs=2)
        least, most = json.loads(Path(folder, "seconds").read_text())
    # Of two ranks an all-reduce moves half of the tensor, twice.
    link = {"bytes_per_second": LARGEST_SUM / max(most - least, 1e-9), "efficiency": 1.0}
    return {
        "name": f"{os.cpu_count()} cores of {platform.machine()}, measured",
        "memory_bytes": psutil.virtual_memory().total,
        "collective_seconds": least,
        "domain_size": os.cpu_count(),
        "domain": link,
        "network": link,
        "overlap": 0.0,  # the cores move the bytes themselves
    }


@functools.cache
def _host(dtype: str) -> dict[str, float]:
    """Return the host's time for a layer and for a step, from steps of two models with next to no computation."""
    with tempfile.TemporaryDirectory(prefix="host-") as folder, contextlib.ExitStack() as stack:
        tokens = write_tokens(Path(folder, "tokens"), NARROW.vocab_size, 100 * NARROW.seq_length)
        ranks = []
        for layers in NARROW_LAYERS:
            model, run = dataclasses.replace(NARROW, num_layers=layers), Path(folder, str(layers))
            values = run_values(model, dtype, tokens, run, device="cpu")
            values["training"] |= {"micro_batch_size": 1, "global_batch_size": 1}
            ranks.append(stack.enter_context(contextlib.closing(ranks_of(values, 1))))
            ranks[-1].begin()
            ranks[-1].steps(NARROW_STEPS)
        turns = [[rank.steps(NARROW_STEPS) for rank in ranks] for _ in range(REPEATS)]
    few, many = map(min, zip(*turns, strict=True))
    a_layer = max(0.0, many - few) / (NARROW_LAYERS[1] - NARROW_LAYERS[0])
    return {"layer_seconds": a_layer, "step_seconds": max(0.0, few - NARROW_LAYERS[0] * a_layer)}


def _time_sums(rank: int, folder: str) -> None:
    """Write the seconds of an all-reduce over two ranks, for one number and for many bytes."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    seconds = []
    for elements in (1, LARGEST_SUM // 4):
        tensor = torch.ones(elements)
        dist.all_reduce(tensor)
        started = time.perf_counter()
        for _ in range(SUMS):
            dist.all_reduce(tensor)
        seconds.append((time.perf_counter() - started) / SUMS)
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def predicted_seconds(run: dict[str, Any], machine: dict[str, Any]) -> float:
    """Return the seconds of a step by formula; run (of one rank) and machine are plain values."""
    config = config_from_dict(run)
    on_cpu = config.runtime.device == "cpu"
    job = config.job(1, layers="local" if on_cpu else "transformer_engine", on_cpu=on_cpu)
    return step_time(job, build_machine(machine, "the measured machine")).seconds


def _attention_rate(model: FANformerConfig, micro_batch_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of causal attention, forward and backward, with FLOPs counted as in the formula."""
    shape = (micro_batch_size, model.num_attention_heads, model.seq_length, model.kv_channels)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=dtype, device=device)

    def both() -> None:
        context = attention(query, key, value, scale=None, is_causal=True)
        torch.autograd.grad(context, (query, key, value), gradient)

    causal = 2 * model.num_attention_heads * model.kv_channels * model.seq_length**2 * micro_batch_size
    flops = (1 + FLASH_BACKWARD) * causal
    return flops / min(timed(both, device) for _ in range(REPEATS))


def _memory_rate(model: FANformerConfig, micro_batch_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the bytes per second of an element-wise function of the MLP's width.

    On a GPU the function is a sum of two tensors. On a CPU, where computing takes longer than moving, it is SwiGLU,
    forward and backward, with the bytes that the formula counts for it.
    """
    tokens, width = micro_batch_size * model.seq_length, model.ffn_hidden_size
    first, second = (torch.randn(tokens, width, dtype=dtype, device=device) for _ in range(2))
    if device.type == "cuda":
        return 3 * first.nbytes / min(timed(lambda: torch.add(first, second), device) for _ in range(REPEATS))
    both = torch.cat([first, second], dim=1).requires_grad_()

    def forward_and_backward() -> None:
        torch.autograd.grad(swiglu(both), both, first)

    moved = 8 * first.nbytes
    return moved / min(timed(forward_and_backward, device) for _ in range(REPEATS))
