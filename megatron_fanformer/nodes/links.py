"""Speed of communication between nodes: an all-reduce between each node and its two neighbours in a ring.

Each pair is a group of its own, so that a node that does not answer costs its neighbours one link, and the
others nothing. With an even number of nodes all links are measured in two rounds, with an odd one in three; a node has
one link at a time.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.nodes.judgement import Links

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20  # of a message: enough for the rate of large ones
REPETITIONS = 5  # after one that does not count; the median of them counts
LINK_SECONDS = 30.0  # for a pair to meet, for its group to be made, and for a collective
ROUND_SECONDS = 3 * LINK_SECONDS  # how late a link may end
ROUNDS = 3  # at most


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring, in rounds in which each node has one pair at most."""
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
    began = time.monotonic()
    for turn, pairs in enumerate(rounds(nodes)):
        for pair in (pair for pair in pairs if number in pair):
            other = pair[0] if pair[1] == number else pair[1]
            links[other] = [0.0] * max(1, gpus)
            own = dist.PrefixStore(f"link-{pair[0]}-{pair[1]}", store)
            # The other one may come late from a link that was given up.
            latest = began + turn * ROUND_SECONDS + LINK_SECONDS
            try:
                _meet(own, number, other, max(LINK_SECONDS, latest - time.monotonic()))
                for device in range(max(1, gpus)):
                    links[other][device] = _rate(own, pair.index(number), device if gpus else None)
            except RuntimeError:  # torch's for a peer that is gone, or late: what is left of the link stays at 0
                continue


def _meet(store: Any, number: int, other: int, seconds: float) -> None:
    """Wait until the other node is at the link, too: a group of one would be waited for much longer."""
    meeting = dist.PrefixStore("meeting", store)
    meeting.set(str(number), "")
    meeting.wait([str(other)], timedelta(seconds=seconds))


def _rate(store: Any, rank: int, gpu: int | None) -> float:
    """Return bytes per second that each of the two sends in an all-reduce, which is as many as it holds.

    Args:
        gpu: None: between the processors.

    Raises:
        RuntimeError: the other one does not answer; over NCCL only with `devices.enable_collective_timeouts`.
    """
    on_gpu = gpu is not None
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if on_gpu:
        torch.cuda.set_device(device)
    message = torch.ones((GPU_BYTES if on_gpu else CPU_BYTES) // 4, device=device)
    seconds = []
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore(str(gpu), store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LINK_SECONDS),
    )
    try:
        for _ in range(1 + REPETITIONS):
            if on_gpu:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            dist.all_reduce(message, op=dist.ReduceOp.MAX, async_op=True).wait()  # which has the limit
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    finally:
        dist.destroy_process_group()
    return message.nbytes / sorted(seconds[1:])[REPETITIONS // 2]
