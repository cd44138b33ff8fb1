"""This machine's GPUs as NVIDIA's driver lists them, the cores near each, and the binding of a rank to those.

Read from /proc and /sys, so that it takes neither torch nor a program; numactl does the same, where it is installed.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
DRIVER_GPUS = "proc/driver/nvidia/gpus"
PCI_DEVICES = "sys/bus/pci/devices"
# Blackwell and what came after it: B200, GB200, B300, "RTX PRO 6000 Blackwell", R100.
AFTER_HOPPER = re.compile(r"\b[GV]?[BR]\d{3}\b|Blackwell")


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A GPU of this machine, whether or not this process may see it."""

    address: str
    """Its PCI address, such as `0000:1b:00.0`."""
    model: str
    uuid: str

    @property
    def is_after_hopper(self) -> bool:
        """Return whether it is of the Blackwell architecture or later, by its name."""
        return AFTER_HOPPER.search(self.model) is not None


def gpus(system: Path = ROOT) -> list[PciGpu]:
    """Return the GPUs that the driver lists, in the order of their addresses; none without a driver.

    Args:
        system: where `proc` and `sys` are.
    """
    found = []
    for file in sorted((system / DRIVER_GPUS).glob("*/information")):
        with suppress(OSError):
            facts = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", file.read_text(), re.MULTILINE))
            found.append(
                PciGpu(address=file.parent.name, model=facts.get("Model", "unknown"), uuid=facts.get("GPU UUID", ""))
            )
    return found


def near_cores(address: str, system: Path = ROOT) -> set[int]:
    """Return the cores of the NUMA node that a PCI device hangs on; none where the kernel does not list them."""
    try:
        listed = (system / PCI_DEVICES / address.lower() / "local_cpulist").read_text()
        return {core for part in listed.strip().split(",") if part for core in _range(part)}
    except (OSError, ValueError):
        return set()


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def cores_text(cores: Iterable[int]) -> str:
    """Return cores as the kernel lists them: `0-47,96-143`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


@dataclass(frozen=True)
class Binding:
    """The outcome of `bind_near`: what to report of it."""

    text: str
    is_problem: bool = False


def bind_near(uuid: str, *, is_bound: bool, system: Path = ROOT) -> Binding | None:
    """Keep this process, and what it starts from now on, on the cores near a GPU, of those that it may use.

    Memory follows, since the kernel takes it from the node of the core that first writes to it.

    Args:
        uuid: of the GPU, as the driver writes it.
        is_bound: whether a launcher has bound this process to cores of its own; that stays as it is.

    Returns:
        None where there is nothing to report: its cores are all near, or the machine does not list which are.
    """
    address = next((gpu.address for gpu in gpus(system) if gpu.uuid == uuid), None)
    near = near_cores(address, system) if address is not None else set()
    allowed = os.sched_getaffinity(0)
    if not near or allowed <= near:
        return None
    common = allowed & near
    if is_bound or not common:
        return Binding(
            f"this rank may use the cores {cores_text(allowed)}, and those near its GPU ({address}) are "
            f"{cores_text(near)}: its launcher has bound it, and that is kept; srun --cpu-bind=none leaves it to the "
            "rank",
            is_problem=True,
        )
    try:
        for thread in Path("/proc/self/task").iterdir():  # those that libraries have started, too
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), common)
    except OSError as error:  # a sandbox may refuse it: the run is as right without
        return Binding(
            f"this rank cannot be bound to the cores {cores_text(common)}, near its GPU ({address}): {error.strerror}; "
            "set runtime.numa_binding to false",
            is_problem=True,
        )
    return Binding(f"bound to the cores {cores_text(common)}, near its GPU ({address})")
