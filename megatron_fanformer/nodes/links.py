"""Speed of communication between nodes: an all-reduce between each node and its two neighbours in a ring.

Each GPU is measured by itself, and then all at once, which takes all of a node's adapters. Each pair is a group of its
own, so that a node that does not answer costs its neighbours one link, and the others nothing. With an even number of
nodes all links are measured in two rounds, with an odd one in three; a node has one link at a time.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_fanformer.nodes.collectives import rate_between
from megatron_fanformer.nodes.judgement import Links, Rates
from megatron_fanformer.nodes.limits import LINK_SECONDS, ROUND_SECONDS


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
            rates = links[other] = Rates(alone=[0.0] * max(1, gpus))
            own = dist.PrefixStore(f"link-{pair[0]}-{pair[1]}", store)
            # The other one may come late from a link that was given up.
            latest = began + turn * ROUND_SECONDS + LINK_SECONDS
            try:
                _meet(own, number, other, max(LINK_SECONDS, latest - time.monotonic()))
                for device in range(max(1, gpus)):
                    rates.alone[device] = rate_between(own, str(device), pair.index(number), [device] if gpus else [])
                if gpus > 1:
                    rates.together = 0.0
                    rates.together = rate_between(own, "together", pair.index(number), range(gpus))
            except RuntimeError:  # torch's for a peer that is gone, or late: what is left of the link stays at 0
                continue


def _meet(store: Any, number: int, other: int, seconds: float) -> None:
    """Wait until the other node is at the link, too: a group of one would be waited for much longer."""
    meeting = dist.PrefixStore("meeting", store)
    meeting.set(str(number), "")
    meeting.wait([str(other)], timedelta(seconds=seconds))
