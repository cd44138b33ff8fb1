"""Check nodes before a run: a process for each GPU, started by torchrun or srun (as for `train`, MASTER_ADDR exported).

    torchrun --nproc-per-node 8 examples/check_nodes.py        # this node alone
    srun --ntasks-per-node=8 python3 examples/check_nodes.py   # all nodes of a job, compared with each other

Each process times a matrix product in bf16; then the processes of a node time an all-reduce, and those of each two
neighbors in a ring of nodes. Rank 0 prints a row for each node. Exit code 1: one is marked, or did not answer.
"""

import argparse
import importlib.metadata
import math
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.agreement import store_of_ranks
from megatron_fanformer.terminal import table

LIMIT = timedelta(minutes=3)  # for the others to come, and for a collective
REPETITIONS = 5  # after one that does not count; the median of them counts
FIGURES = {"TFLOP/s": 1e12, "GiB free": 2**30, "GB/s within": 1e9, "GB/s between": 1e9}
# Xids that a program causes (NVIDIA's Xid catalog), and 63, by which memory was repaired.
XIDS_OF_PROGRAMS = {"13", "31", "32", "43", "45", "63", "68", "69"}
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")


def main() -> int:
    """Measure, compare and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tolerance", type=float, default=0.85, help="the least share of the median that a figure may be (0.85)"
    )
    tolerance = parser.parse_args().tolerance
    devices.prepare_libraries()
    address = devices.rank_address() or devices.RankAddress(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_address="127.0.0.1", master_port=0
    )
    if address.world_size == address.local_world_size:
        devices.listen_on_loopback()
    facts: list[dict[str, Any]] = [{} for _ in range(address.world_size)]
    try:
        device = torch.device(devices.resolve_device("auto"))
        if device.type == "cuda":
            torch.cuda.set_device(address.local_rank % torch.cuda.device_count())
        store = store_of_ranks(address, LIMIT)
        dist.init_process_group("gloo", store=store, rank=address.rank, world_size=address.world_size, timeout=LIMIT)
        own = facts_here(device, is_first=address.local_rank == 0)
        dist.monitored_barrier(timeout=LIMIT, wait_all_ranks=True)  # names those that hang
        own["figures"] |= bus_rates(address, device)
        dist.all_gather_object(facts, own)
    except (FanformerError, RuntimeError) as error:  # the latter is torch's
        print(f"{devices.node_name()}, rank {address.rank}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    rows = compared(facts, address.local_world_size, tolerance)
    if address.rank == 0:
        print("\n".join(table(["node", *FIGURES, ""], rows, align="lrrrrl")), flush=True)
    dist.barrier()  # a launcher ends the others once one has failed
    dist.destroy_process_group()
    return int(any(row[-1] for row in rows))


def facts_here(device: torch.device, *, is_first: bool) -> dict[str, Any]:
    """Return what can be known of this process without others; of its node, where it is the first there."""
    if device.type == "cuda":
        free, size, count = torch.cuda.mem_get_info()[0], 8192, 100  # until its clock is what it stays at
        versions = {
            "GPU": torch.cuda.get_device_name(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "the driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        }
    else:
        free, size, count, versions = psutil.virtual_memory().available, 2048, 1, {}
    factor = torch.randn(size, size, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    return {
        "node": devices.node_name(),
        "figures": {"TFLOP/s": 2 * size**3 * count / seconds_of(multiply), "GiB free": free},
        "versions": {
            **{name: importlib.metadata.version(name) for name in ("megatron_fanformer", "megatron-core", "torch")},
            **versions,
        },
        "errors": gpu_errors() if is_first and device.type == "cuda" else [],
    }


def gpu_errors() -> list[str]:
    """Return the errors that this node's GPUs have counted, and those of the last day in the kernel's log."""
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    counts = output_of("nvidia-smi", query, "--format=csv,noheader,nounits")
    log = output_of("journalctl", "--dmesg", "--since=-24h", "--no-pager", "--quiet") or output_of("dmesg")
    for text, unknown in ((counts, "memory errors (nvidia-smi)"), (log, "Xid errors (the kernel's log)")):
        if not text:
            print(f"{devices.node_name()}: {unknown} cannot be read here, and are not checked", file=sys.stderr)
    uncorrected = re.findall(r"^(\d+), ([1-9]\d*)$", counts, re.MULTILINE)
    return [
        *(f"GPU {gpu} has {errors} uncorrectable memory errors" for gpu, errors in uncorrected),
        *(f"GPU {gpu} had Xid {xid}" for gpu, xid in dict.fromkeys(XID.findall(log)) if xid not in XIDS_OF_PROGRAMS),
    ]


def output_of(*command: str) -> str:
    """Return what a program prints; nothing if it fails, takes too long, or is not there."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout.strip()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median of a few calls' times; the first call, which makes what later ones use, does not count."""
    times = []
    for _ in range(1 + REPETITIONS):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def bus_rates(address: devices.RankAddress, device: torch.device) -> dict[str, float]:
    """Return the bus bandwidth in this node and with a neighbor, the better of two: a link has another end, too."""
    local = address.local_world_size
    node, nodes = address.rank // local, address.world_size // local
    own = range(node * local, (node + 1) * local)
    within = {"GB/s within": bus_rate(own, device)} if local > 1 else {}
    pairs = [{start, (start + 1) % nodes} for start in range(nodes if nodes > 2 else nodes - 1)]
    even = len(pairs) - len(pairs) % 2
    between = []
    for turn in filter(None, (pairs[0:even:2], pairs[1::2], pairs[even:])):  # in each a node has one pair at most
        mine = next((pair for pair in turn if node in pair), set())
        ranks = [rank for other in sorted(mine) for rank in range(other * local, (other + 1) * local)]
        # torch names groups by how many a process has made: one without a pair makes one, too.
        between.append(bus_rate(ranks or [address.rank], device))
    return within | ({"GB/s between": max(between)} if between else {})


def bus_rate(ranks: Sequence[int], device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce over these ranks, as nccl-tests define it; all of them call this."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(ranks, timeout=LIMIT, backend=backend, use_local_synchronization=True)
    message = torch.ones(1 << (28 if device.type == "cuda" else 22), device=device)
    seconds = seconds_of(lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group))
    dist.destroy_process_group(group)
    return 2 * (len(ranks) - 1) / len(ranks) * message.nbytes / seconds


def compared(facts: Sequence[dict[str, Any]], local: int, tolerance: float) -> list[list[str]]:
    """Return a row for each node: its name, the least of its processes' figures, and what is wrong with it."""
    rows = [[facts[first]["node"]] for first in range(0, len(facts), local)]
    wrong = [
        [error for rank in facts[first : first + local] for error in rank["errors"]]
        for first in range(0, len(facts), local)
    ]
    for name, unit in FIGURES.items():
        values = [rank["figures"].get(name, math.nan) / unit for rank in facts]
        median = statistics.median_high(values)
        for node, row in enumerate(rows):
            least = min(values[node * local : (node + 1) * local])
            row.append("-" if math.isnan(least) else f"{least:,.4g}")
        for rank, value in enumerate(values):
            if value < tolerance * median:
                wrong[rank // local].append(
                    f"{name} of rank {rank} is {value:,.4g}, below {tolerance:g} of the median ({median:,.4g})"
                )
    for name in facts[0]["versions"]:
        versions = [rank["versions"].get(name) for rank in facts]
        usual = Counter(versions).most_common(1)[0][0]
        for rank, version in enumerate(versions):
            if version != usual:
                wrong[rank // local].append(f"{name} of rank {rank} is {version}, and of most {usual}")
    return [[*row, "; ".join(problems)] for row, problems in zip(rows, wrong, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
