"""Rates that links should reach, by GPU and adapter, and what is below half of them.

Half: a link that works, at the message sizes measured here, is well above; one that falls back is far below.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fanformer.nodes.facts import Facts
from megatron_fanformer.nodes.hardware import SOCKET

LEAST_SHARE = 0.5
CAUSES = (
    "the usual causes, likeliest first: TCP in place of RDMA, NCCL_IB_HCA or NCCL_SOCKET_IFNAME of another network, a "
    "link at a lower rate (ibstat), no GPUDirect (docs/clusters.md#the-network)"
)
AZURE = "github.com/Azure/azurehpc-health-checks, conf/"


@dataclass(frozen=True, kw_only=True)
class NodeRate:
    """The bus bandwidth of an all-reduce among a node's GPUs over NVLink."""

    gpus: str
    """Pattern of their name."""
    bytes_per_second: float
    source: str


# What Azure's checks demand of nccl-tests at 16 GB. (NVSwitch adds up on the way, so that the bus bandwidth of an H100
# may be above its NVLink's 450 GB/s.)
WITHIN_NODE = (
    NodeRate(gpus=r"\bH100 80GB HBM3", bytes_per_second=460e9, source=AZURE + "nd96isr_h100_v5.conf"),
    NodeRate(gpus=r"\bH200$", bytes_per_second=431e9, source=AZURE + "nd96isr_h200_v5.conf"),
    NodeRate(gpus=r"\bA100-SXM", bytes_per_second=228e9, source=AZURE + "nd96amsr_a100_v4.conf"),
    NodeRate(
        gpus=r"\bG?B[23]00\b", bytes_per_second=432e9, source=AZURE + "nd128isr_ndr_gb200_v6.conf"
    ),  # of four GPUs
)


def within_node_problems(facts: Facts) -> Iterator[str]:
    """Yield what an all-reduce among a node's GPUs shows to be wrong."""
    rate = facts.bus_bytes_per_second
    expected = _within_node(facts)
    if rate is not None and expected is not None and rate < LEAST_SHARE * expected.bytes_per_second:
        yield (
            f"an all-reduce among its {len(facts.gpus)} GPUs moves {rate / 1e9:.3g} GB/s, below half of what "
            f"{facts.gpus[0].name} reaches over NVLink ({expected.bytes_per_second / 1e9:.0f}); the usual causes: an "
            "NVLink that is down (nvidia-smi nvlink --status), Fabric Manager that does not run, NCCL_P2P_DISABLE"
        )


def _within_node(facts: Facts) -> NodeRate | None:
    name = facts.gpus[0].name if facts.gpus else ""
    return next((rate for rate in WITHIN_NODE if re.search(rate.gpus, name)), None)


def adapters_text(facts: Facts) -> str:
    """Return a node's adapters by their rates, such as `8 × 400 Gb/s`."""
    counts = Counter(8 * adapter.bytes_per_second / 1e9 for adapter in facts.adapters)
    return ", ".join(f"{count} × {rate:g} Gb/s" for rate, count in sorted(counts.items(), reverse=True)) or "none"


def network_rates(facts: Facts) -> tuple[float, float] | None:
    """Return bytes per second that its adapters can carry, of one GPU alone, and of each where all send at once.

    Adapters at less than half of the fastest one's rate are of other networks. None where none is visible.
    """
    rates = [adapter.bytes_per_second for adapter in facts.adapters]
    if not rates:
        return None
    fastest = max(rates)
    return fastest, min(fastest, sum(rate for rate in rates if rate >= fastest / 2) / max(1, len(facts.gpus)))


def tcp_problem(facts: Facts) -> str | None:
    """Return what is wrong where NCCL sends by TCP in place of RDMA; None where it does not, or has nothing else."""
    if facts.network != SOCKET:
        return None
    if facts.adapters:
        return (
            f"NCCL sends by TCP, and its adapters ({adapters_text(facts)}) could by RDMA: in a container it needs "
            "libibverbs1, ibverbs-providers and /dev/infiniband, and NCCL_IB_DISABLE must not be 1 "
            "(docs/clusters.md#the-network)"
        )
    if _within_node(facts) is not None:
        return (
            "NCCL sends by TCP, and no RDMA adapter is visible here; give the container the node's "
            "(docs/clusters.md#the-network), or state --minimum-bandwidth where TCP is meant"
        )
    return None
