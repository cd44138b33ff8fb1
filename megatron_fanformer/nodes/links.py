"""How fast two nodes communicate: an all-reduce between each node and its two neighbours in a ring.

Each pair is a group of its own, so that a node that does not answer costs its neighbours one link, and nobody else
anything. Of an even number of nodes all links are measured in two rounds, of an odd one in three; a node has but one
link at a time.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.nodes.judgement import Links

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20  # of a message: enough for the rate of large ones
REPETITIONS = 5  # after one that does not count; the median of them counts
LINK_SECONDS = 30.0  # for a pair to meet, and for each of its collectives


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours in a ring, in rounds in which each node has one pair at most."""
    count = len(nodes)
    if count < 2:
        return []
    if count == 2:
        return [[(nodes[0], nodes[1])]]
    ring = [(nodes[number], nodes[(number + 1) % count]) for number in range(count)]
    last = [ring.pop()] if count % 2 else []
    return [part for part in (ring[0::2], ring[1::2], last) if part]


def measure_links(links: Links, store: Any, number: int, nodes: Sequence[int], gpus: int) -> None:
    """Measure this node's links, and note each in `links` as it is known.

    Args:
        store: of all nodes.
        nodes: the numbers of those that take part; every one of them calls this.
        gpus: of each node; 0: over gloo, between the processors.
    """
    for pairs in rounds(nodes):
        for pair in pairs:
            if number in pair:
                other = pair[0] if pair[1] == number else pair[1]
                links[other] = [0.0] * max(1, gpus)
                for device, rate in _rates(store, pair, number, gpus):
                    links[other][device] = rate


def _rates(store: Any, pair: tuple[int, int], number: int, gpus: int) -> Iterator[tuple[int, float]]:
    for device in range(max(1, gpus)):
        if gpus:
            torch.cuda.set_device(device)
        own = dist.PrefixStore(f"link-{pair[0]}-{pair[1]}-{device}", store)
        try:
            dist.init_process_group(
                "nccl" if gpus else "gloo",
                store=own,
                rank=pair.index(number),
                world_size=2,
                timeout=timedelta(seconds=LINK_SECONDS),
            )
            try:
                yield device, _rate(torch.device("cuda", device) if gpus else torch.device("cpu"))
            finally:
                dist.destroy_process_group()
        except RuntimeError:  # torch's for a peer that is gone, or late: the link is left at 0
            continue


def _rate(device: torch.device) -> float:
    """Bytes per second that each of the two sends in an all-reduce, which is as many as it holds."""
    on_gpu = device.type == "cuda"
    message = torch.ones((GPU_BYTES if on_gpu else CPU_BYTES) // 4, device=device)
    seconds = []
    for _ in range(1 + REPETITIONS):
        if on_gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return message.nbytes / sorted(seconds[1:])[REPETITIONS // 2]
