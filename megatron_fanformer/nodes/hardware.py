"""This node's hardware as nvidia-smi, /sys and the kernel's log describe it: faults of GPUs, and network adapters."""

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

ROOT = Path("/")
PROGRAM_SECONDS = 30.0
POLL_SECONDS = 0.05
BUSY_POLL_SECONDS = 0.001  # a GPU that waited longer would lower its clock
ADAPTERS = "sys/class/infiniband"  # of InfiniBand, RoCE and EFA alike
XID_HOURS = 24
# Xids that a program causes (NVIDIA's Xid catalog), and 63, by which memory was repaired: `REMAPPED` has what is left.
XIDS_OF_PROGRAMS = {13, 31, 32, 43, 45, 63, 68, 69}
XID = re.compile(r"^(?P<when>\S+) .*?NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<number>\d+)", re.MULTILINE)
ISO_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,]\d+)?([+-]\d\d):?(\d\d)")
HEALTH = "index,name,pcie.link.width.current,pcie.link.width.max,ecc.errors.uncorrected.volatile.total"
REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
BESIDE_GRACE = re.compile(r"\bG[HB]\d{3}\b")  # whose way to the host is NVLink, not PCIe
NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (\S+)")
SOCKET = "Socket"  # NCCL's name of TCP


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A port of a network adapter that can do RDMA, and is up."""

    name: str
    bytes_per_second: float
    """The rate that its link runs at, in each direction."""


def adapters(system: Path = ROOT) -> list[Adapter]:
    """Return the RDMA ports that are up, in the order of their names.

    Args:
        system: where `sys` is.
    """
    found = []
    for port in sorted((system / ADAPTERS).glob("*/ports/*")):
        with suppress(OSError):
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
            gigabits = re.match(r"([\d.]+) Gb/sec", rate)
            if "ACTIVE" in state and gigabits:
                name = f"{port.parent.parent.name}:{port.name}"
                found.append(Adapter(name=name, bytes_per_second=float(gigabits[1]) * 1e9 / 8))
    return found


def network_of_log(text: str) -> str | None:
    """Return the network that NCCL chose, as its log names it (`IB`, `Socket`, a plugin's); None: it does not."""
    found = NETWORK.findall(text)
    return found[-1] if found else None


def query_nvidia_smi(what: str, *options: str, meanwhile: Callable[[], None] | None = None) -> list[str] | None:
    """Return what nvidia-smi answers to a query of GPUs, a line for each; None if it does not, or is not there.

    Args:
        meanwhile: is called again and again until it has ended.
    """
    query = ("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", *options)
    return output_of(*query, meanwhile=meanwhile)


def find_faults() -> tuple[list[str], list[str]]:
    """Return what is wrong with this node's GPUs by their own counters and the kernel's log, and what was not seen."""
    problems: list[str] = []
    unseen = []
    if (lines := query_nvidia_smi(HEALTH)) is None:
        unseen.append("PCIe links and ECC errors (nvidia-smi does not answer)")
    problems += health_problems(lines or ())
    problems += remapping_problems(
        output_of("nvidia-smi", f"--query-remapped-rows={REMAPPED}", "--format=csv,noheader") or ()
    )
    log = output_of("journalctl", "--dmesg", f"--since=-{XID_HOURS}h", "--output=short-iso", "--no-pager", "--quiet")
    log = log or output_of("dmesg", "--time-format=iso")
    if log:
        problems += xid_problems("\n".join(log), datetime.now(timezone.utc))
    else:  # an empty one is as good as none: without the right to it, journalctl shows nothing
        unseen.append("Xid errors (this user may not read the kernel's log)")
    return problems, unseen


def health_problems(lines: Iterable[str]) -> Iterator[str]:
    """Yield what `HEALTH` shows to be wrong; a value in brackets, such as `[N/A]`, is none."""
    for gpu, name, width, widest, errors in _rows(lines, HEALTH):
        has_width = width.isdecimal() and widest.isdecimal() and not BESIDE_GRACE.search(name)
        if has_width and int(width) < int(widest):
            yield (
                f"GPU {gpu} has a PCIe link of {width} lanes, and may have {widest}: copies to and from it, and to the "
                "network, are as much slower; have it seated anew"
            )
        if errors.isdecimal() and int(errors):
            yield f"GPU {gpu} has counted {errors} uncorrectable memory errors since its driver was loaded; reset it"


def remapping_problems(lines: Iterable[str]) -> Iterator[str]:
    """Yield what `REMAPPED` shows to be wrong."""
    for gpu, pending, failure in _rows(lines, REMAPPED):
        if failure.lower() in ("yes", "1"):
            yield f"GPU {gpu} could not replace a broken row of its memory; replace it"
        elif pending.lower() in ("yes", "1"):
            yield f"GPU {gpu} replaces a broken row of its memory when it is reset; reset it"


def _rows(lines: Iterable[str], query: str) -> Iterator[list[str]]:
    """Yield the cells of the lines that answer a query; another one, such as `No devices were found`, does not."""
    rows = ([cell.strip() for cell in line.split(",")] for line in lines)
    return (row for row in rows if len(row) == len(query.split(",")))


def xid_problems(log: str, now: datetime) -> Iterator[str]:
    """Yield the hardware's Xid errors of the last `XID_HOURS` hours, each once for a GPU.

    Args:
        log: the kernel's, with ISO times; a line whose time cannot be read counts.
    """
    since = now - timedelta(hours=XID_HOURS)
    counts: Counter[tuple[str, int]] = Counter()
    for found in XID.finditer(log):
        number = int(found["number"])
        if number not in XIDS_OF_PROGRAMS and ((when := _time(found["when"])) is None or when >= since):
            counts[found["gpu"], number] += 1
    for (gpu, number), count in counts.items():
        times = "once" if count == 1 else f"{count} times"
        yield (
            f"GPU {gpu} reported Xid {number} {times} within {XID_HOURS} hours; NVIDIA's Xid catalog says what to do "
            "(docs.nvidia.com/deploy/xid-errors)"
        )


def _time(text: str) -> datetime | None:
    found = ISO_TIME.match(text)
    return datetime.strptime("".join(found.groups()), "%Y-%m-%dT%H:%M:%S%z") if found else None


def output_of(*command: str, meanwhile: Callable[[], None] | None = None) -> list[str] | None:
    """Return the lines that a program prints; None if it fails, takes too long, or is not there.

    Args:
        meanwhile: is called again and again until it has ended.
    """
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
    except OSError:
        return None
    end = time.monotonic() + PROGRAM_SECONDS
    while time.monotonic() < end:
        if meanwhile is not None:
            meanwhile()
        with suppress(subprocess.TimeoutExpired):
            output = process.communicate(timeout=BUSY_POLL_SECONDS if meanwhile else POLL_SECONDS)[0]
            return output.splitlines() if process.returncode == 0 else None
    process.kill()
    process.communicate()
    return None
