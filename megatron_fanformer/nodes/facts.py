"""Facts about this node: its versions, its GPUs or cores, how fast they multiply and talk, where it can write."""

import importlib.metadata
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.errors import InputError
from megatron_fanformer.nodes.hardware import Adapter, adapters, find_faults, network_of_log, query_nvidia_smi
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime import device as devices

LEAST_FREE_SHARE = 0.95  # of a GPU's memory: a context of our own takes half a GiB
MOST_BUSY_PERCENT = 10.0  # of a GPU's time, before it is given any work
LEAST_FREE_BYTES = 1 << 30  # of a disk
PROBE_BYTES = 1 << 20  # written and read back
GPU_MATRIX, CPU_MATRIX = 8192, 2048  # rows and columns of the square products
CPU_SECONDS = 0.5  # of products on a CPU; the fastest counts
GPU_REPETITIONS = 100
STARTING = "importing torch"  # without which it cannot report to the others
DRIVER = "the driver"  # among the versions; nvidia-smi alone reports it
SHARED_MEMORY = Path("/dev/shm")  # data loaders and NCCL pass messages there


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The facts of one GPU."""

    number: int
    """Its number in its node, whose other GPUs may be unusable."""
    name: str
    flops_per_second: float
    """FLOP/s of bf16 products."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors under that load; None where nvidia-smi does not report it."""
    most_mhz: float | None = None
    """The highest that it has."""


@dataclass(kw_only=True)
class Facts:
    """The facts of a node, filled in as they are found out, so that what hangs leaves the rest."""

    node: str = field(default_factory=devices.node_name)
    problems: list[str] = field(default_factory=list)
    """Problems of this node, whatever the others show."""
    doing: str = STARTING
    """The measurement in progress."""
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = field(default_factory=usable_cores)
    gpus: list[Gpu] = field(default_factory=list)
    flops_per_second: float | None = None
    """FLOP/s of products on its cores; None where it has GPUs."""
    bus_bytes_per_second: float | None = None
    """Bytes that each of its GPUs sends per second in an all-reduce among them; None of fewer than two."""
    adapters: list[Adapter] = field(default_factory=list)
    network: str | None = None
    """The network that NCCL chose, by its own log; None where that is not known."""
    unseen: list[str] = field(default_factory=list)
    """What could not be looked at."""
    shared_file: str | None = None
    """Path of the file that it left in the shared folder, for the judge to read."""
    shared_text: str = ""


def facts_from_plain(values: dict[str, Any]) -> Facts:
    """Return the facts that a node has sent, as plain values."""
    gpus, ports = [Gpu(**gpu) for gpu in values["gpus"]], [Adapter(**port) for port in values["adapters"]]
    return Facts(**{**values, "gpus": gpus, "adapters": ports})


def find_facts(facts: Facts, folder: Path | None) -> None:
    """Find out everything about this node; what fails is a problem of it, and the rest is still measured.

    Args:
        folder: of the shared file system; None: it is not looked at.
    """
    try:
        import torch  # a file system that hangs shows here first
    except (ImportError, OSError) as error:
        _note_failure(facts, error)
        return
    parts: list[tuple[str, Callable[[Facts], None]]] = [
        ("its versions", _find_versions),
        # Python itself tries to write there, and refuses to name a folder where it cannot.
        ("writing to the temporary folder", lambda facts: _write_to(facts, Path(tempfile.gettempdir()))),
    ]
    if SHARED_MEMORY.is_dir():
        parts.append((f"writing to {SHARED_MEMORY}", lambda facts: _write_to(facts, SHARED_MEMORY)))
    if folder is not None:
        parts.append((f"writing to {folder}", lambda facts: _share(facts, folder)))
    if _has_gpus(facts):
        parts += [
            ("its GPUs", _find_gpus),
            ("an all-reduce among its GPUs", _find_collective),
            ("the counters of its GPUs", _find_faults),
        ]
    else:
        parts.append(("its matrix rate", _find_processor_rate))
    for doing, find in parts:
        facts.doing = doing
        try:
            find(facts)
        except (ImportError, OSError, RuntimeError) as error:
            _note_failure(facts, error)
    facts.doing = "done"
    del torch


def _note_failure(facts: Facts, error: Exception) -> None:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    facts.problems.append(f"{facts.doing} failed ({lines[0]}); leave the node out, and have it looked at")


def _has_gpus(facts: Facts) -> bool:
    try:
        return devices.resolve_device("auto") == "cuda"
    except InputError as error:
        facts.problems.append(str(error))
        return False


def _find_versions(facts: Facts) -> None:
    import torch

    facts.versions.update(
        {
            "megatron_fanformer": __version__,
            "Python": platform.python_version(),
            "megatron-core": importlib.metadata.version("megatron-core"),
            "torch": torch.__version__,
        }
    )
    if torch.cuda.is_available():
        facts.versions["CUDA"] = str(torch.version.cuda)
        facts.versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if lines := query_nvidia_smi("driver_version"):
            facts.versions[DRIVER] = lines[0]


def _write_to(facts: Facts, place: Path) -> None:
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES and place != SHARED_MEMORY:
        facts.problems.append(f"{place} has {free >> 20} MiB free, and needs {LEAST_FREE_BYTES >> 20}; free some")
    content = secrets.token_bytes(PROBE_BYTES)
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        if file.read() != content:
            raise OSError(f"{place} returns other bytes than were written")


def _share(facts: Facts, folder: Path) -> None:
    _write_to(facts, folder)
    file = folder / f".check-node-{facts.node}-{secrets.token_hex(8)}"
    facts.shared_text = secrets.token_hex(32)
    file.write_text(facts.shared_text)
    facts.shared_file = str(file)


def _find_processor_rate(facts: Facts) -> None:
    import torch

    dtype = torch.bfloat16 if devices.has_bf16_matrix_units("cpu") else torch.float32
    factor = torch.ones(CPU_MATRIX, CPU_MATRIX, dtype=dtype)
    torch.mm(factor, factor)
    fastest, end = float("inf"), time.perf_counter() + CPU_SECONDS
    while time.perf_counter() < end or fastest == float("inf"):
        began = time.perf_counter()
        torch.mm(factor, factor)
        fastest = min(fastest, time.perf_counter() - began)
    facts.flops_per_second = 2 * CPU_MATRIX**3 / fastest


def _find_gpus(facts: Facts) -> None:
    import torch

    for number in range(torch.cuda.device_count()):
        facts.doing = f"GPU {number}"
        try:
            _find_load(number, facts)  # before it is given any work
            facts.gpus.append(_work_of(number, facts))
        except RuntimeError as error:  # torch's: of memory that is not there, or of a GPU that does not answer
            reason = str(error).splitlines()[0]
            facts.problems.append(f"GPU {number} cannot be used ({reason}); leave the node out, and have it looked at")


def _find_load(number: int, facts: Facts) -> None:
    import torch

    [busy] = _query_gpu(number, "utilization.gpu")
    free, total = torch.cuda.mem_get_info(number)
    if free < LEAST_FREE_SHARE * total:
        facts.problems.append(
            f"GPU {number} has {free / total:.0%} of its memory free, and needs {LEAST_FREE_SHARE:.0%}; end what "
            "else runs on it (nvidia-smi shows it)"
        )
    if busy is not None and busy > MOST_BUSY_PERCENT:
        facts.problems.append(
            f"GPU {number} is busy {busy:.0f}% of the time, and may be {MOST_BUSY_PERCENT:.0f}%; end what else "
            "runs on it (nvidia-smi shows it)"
        )


def _work_of(number: int, facts: Facts) -> Gpu:
    import torch

    with torch.cuda.device(number):
        factor = torch.randn(GPU_MATRIX, GPU_MATRIX, dtype=torch.bfloat16, device="cuda")
        product = torch.mm(factor, factor)
        for _ in range(GPU_REPETITIONS):  # until it is warm, and its clock what it stays at
            torch.mm(factor, factor, out=product)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(GPU_REPETITIONS):
            torch.mm(factor, factor, out=product)
        ended.record()

        def keep_busy() -> None:  # for nvidia-smi to see
            for _ in range(GPU_REPETITIONS):
                torch.mm(factor, factor, out=product)
            torch.cuda.synchronize()

        clock, most = _query_gpu(number, "clocks.sm,clocks.max.sm", keep_busy)
        torch.cuda.synchronize()
        if not torch.equal(product, torch.mm(factor, factor)):
            facts.problems.append(f"GPU {number} computes the same product otherwise a second time; replace it")
        seconds = began.elapsed_time(ended) / 1000 / GPU_REPETITIONS
    rate, name = 2 * GPU_MATRIX**3 / seconds, torch.cuda.get_device_name(number)
    return Gpu(number=number, name=name, flops_per_second=rate, clock_mhz=clock, most_mhz=most)


def _find_collective(facts: Facts) -> None:
    """Measure an all-reduce among the GPUs; one alone shows the network that NCCL would use, too."""
    from megatron_fanformer.nodes.collectives import rate_within_node

    with tempfile.NamedTemporaryFile("r", prefix="nccl-", errors="replace") as log:
        devices.log_nccl_to(Path(log.name))
        rate = rate_within_node([gpu.number for gpu in facts.gpus])
        facts.network = network_of_log(log.read())
    if facts.network is None:
        facts.unseen.append("the network that NCCL uses (its log does not say, or NCCL_DEBUG has it go elsewhere)")
    if len(facts.gpus) > 1:
        facts.bus_bytes_per_second = rate


def _find_faults(facts: Facts) -> None:
    facts.adapters = adapters()
    problems, unseen = find_faults()
    facts.problems += problems
    facts.unseen += unseen


def _query_gpu(number: int, what: str, meanwhile: Callable[[], None] | None = None) -> list[float | None]:
    """Return numbers that nvidia-smi reports of a GPU, None for each that it does not."""
    import torch

    uuid = torch.cuda.get_device_properties(number).uuid
    lines = query_nvidia_smi(what, f"--id=GPU-{uuid}", meanwhile=meanwhile) or [""]
    cells = lines[0].split(",")
    wanted = what.split(",")
    return [_number(cell) for cell in cells] if len(cells) == len(wanted) else [None for _ in wanted]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
