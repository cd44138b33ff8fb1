"""Timed all-reduces: among a node's GPUs, and between two nodes."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.nodes.limits import LINK_SECONDS

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20  # of a message between nodes: enough for the rate of large ones
NODE_BYTES = 1 << 30  # of a message within a node
REPETITIONS = 5  # after one that does not count; the median of them counts


def rate_between(store: Any, name: str, rank: int, gpus: Sequence[int]) -> float:
    """Return bytes per second that each GPU of the two nodes sends in an all-reduce, which is as many as it holds.

    Args:
        name: of this measurement, for both nodes.
        gpus: those that communicate at once, each with the other node's of its number; none: the processors do.

    Raises:
        RuntimeError: the other one does not answer; over NCCL only with `devices.enable_collective_timeouts`.
    """
    devices = [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")]
    messages = [torch.ones((GPU_BYTES if gpus else CPU_BYTES) // 4, device=device) for device in devices]
    seconds = []
    if gpus:
        torch.cuda.set_device(devices[0])
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LINK_SECONDS),
    )
    try:
        for turn in range(1 + REPETITIONS):
            _synchronize(gpus)
            began = time.perf_counter()
            works = []
            for message in messages:
                works.append(dist.all_reduce(message, op=dist.ReduceOp.MAX, async_op=True))
                if turn == 0:  # each device's communicator by itself: both nodes make them in this order
                    works.pop().wait()
            for work in works:
                work.wait()  # which has the limit
            _synchronize(gpus)
            seconds.append(time.perf_counter() - began)
    finally:
        dist.destroy_process_group()
    return messages[0].nbytes / _median(seconds)


def rate_within_node(gpus: Sequence[int]) -> float:
    """Return bytes per second that each of these GPUs of this node sends in an all-reduce among them (the bus
    bandwidth).
    """
    from torch.cuda import nccl

    messages = [torch.ones(NODE_BYTES // 4, device=torch.device("cuda", gpu)) for gpu in gpus]
    seconds = []
    for _ in range(1 + REPETITIONS):
        _synchronize(gpus)
        began = time.perf_counter()
        nccl.all_reduce(messages)
        _synchronize(gpus)
        seconds.append(time.perf_counter() - began)
    return 2 * (len(gpus) - 1) / len(gpus) * NODE_BYTES / _median(seconds)


def _synchronize(gpus: Sequence[int]) -> None:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def _median(seconds: list[float]) -> float:
    """Return the median without the first, in which what is used later is made."""
    return sorted(seconds[1:])[REPETITIONS // 2]
