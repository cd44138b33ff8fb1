"""The cores near a GPU, over /proc and /sys of machines that are not here, as the kernel and the driver write them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fanformer.runtime import device, topology
from megatron_fanformer.runtime.topology import PciGpu

# Made after the driver's README ("procfs interface") and Documentation/ABI/testing/sysfs-bus-pci of the kernel.
INFORMATION = """Model: \t\t {model}
IRQ:   \t\t 284
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.89.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {address}
Device Minor: \t 0
GPU Excluded:\t No
"""
H100 = "NVIDIA H100 80GB HBM3"


def machine(folder: Path, gpus: dict[str, tuple[str, str]]) -> Path:
    """A machine's /proc and /sys; `gpus` has the UUID and the near cores of each address."""
    for address, (uuid, cores) in gpus.items():
        listed, device = folder / topology.DRIVER_GPUS / address, folder / topology.PCI_DEVICES / address
        listed.mkdir(parents=True)
        (listed / "information").write_text(INFORMATION.format(model=H100, uuid=uuid, address=address))
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
    return folder


def test_gpus_and_their_cores(tmp_path: Path) -> None:
    near = {"0000:1b:00.0": ("GPU-a", "0-47,96-143"), "0000:9d:00.0": ("GPU-b", "48-95,144-191")}
    system = machine(tmp_path, near)
    assert topology.gpus(system) == [
        PciGpu(address=address, model=H100, uuid=uuid) for address, (uuid, _) in near.items()
    ]
    cores = topology.near_cores("0000:9D:00.0", system)
    assert cores == {*range(48, 96), *range(144, 192)} and topology.cores_text(cores) == "48-95,144-191"
    assert topology.cores_text({5, 3, 4, 9, 0}) == "0,3-5,9" and topology.cores_text(()) == ""
    assert topology.near_cores("0000:00:00.0", system) == set() and topology.gpus(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("model", "after"),
    [
        (H100, False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GH200 480GB", False),
        ("NVIDIA RTX A6000", False),
        ("NVIDIA B200", True),
        ("NVIDIA GB300", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
    ],
)
def test_architectures_are_known_by_name(model: str, after: bool) -> None:
    assert PciGpu(address="", model=model, uuid="").is_after_hopper is after


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """What each thread of this process was bound to; it may use the cores 0 to 15."""
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    return bound


@pytest.mark.parametrize(
    ("near", "is_bound", "cores", "message"),
    [
        ("8-15", False, set(range(8, 16)), "bound to the cores 8-15, near its GPU (0000:1b:00.0)"),
        ("8-23", False, set(range(8, 16)), "bound to the cores 8-15"),  # of its control group
        ("0-31", False, None, None),  # they are all near
        ("", False, None, None),  # a virtual machine that does not say
        ("8-15", True, None, "its launcher has bound it, and that is kept"),
        ("16-31", False, None, "those near its GPU (0000:1b:00.0) are 16-31"),
    ],
)
def test_a_rank_keeps_to_the_cores_near_its_gpu(
    near: str,
    is_bound: bool,
    cores: set[int] | None,
    message: str | None,
    affinity: dict[int, set[int]],
    tmp_path: Path,
) -> None:
    system = machine(tmp_path, {"0000:1b:00.0": ("GPU-a", near), "0000:9d:00.0": ("GPU-b", "0-7")})
    binding = topology.bind_near("GPU-a", is_bound=is_bound, system=system)
    assert (binding is None) == (message is None)
    assert binding is None or (str(message) in binding.text and binding.is_problem == (cores is None))
    assert (os.getpid() in affinity) == (cores is not None)
    assert all(bound == cores for bound in affinity.values())
    assert topology.bind_near("GPU-c", is_bound=False, system=system) is None


def test_a_rank_that_may_not_be_bound_says_so_and_goes_on(
    affinity: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_thread: int, _cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    binding = topology.bind_near("GPU-a", is_bound=False, system=machine(tmp_path, {"0000:1b:00.0": ("GPU-a", "8-15")}))
    assert binding is not None and binding.is_problem and affinity == {}
    assert binding.text.startswith("this rank cannot be bound to the cores 8-15") and "not permitted" in binding.text


def test_a_rank_knows_its_gpu_and_whether_slurm_has_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"1-{number}"))
    monkeypatch.setattr(topology, "bind_near", lambda uuid, *, is_bound: calls.append((uuid, is_bound)))
    monkeypatch.delenv("RANK", raising=False)
    for kind, tasks in (("cores,none", "2"), ("cores,mask_cpu:", "2"), ("cores,mask_cpu:", "1")):
        monkeypatch.setenv("SLURM_CPU_BIND_TYPE", kind)
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        device.bind_near_gpu()
    assert calls == [("GPU-1-3", False), ("GPU-1-3", True), ("GPU-1-3", False)]


def test_threads_and_processes_follow(tmp_path: Path) -> None:
    """On this machine's own cores: in a process that may use one of them afterwards."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process has one core")
    near = max(allowed)
    system = machine(tmp_path, {"0000:1b:00.0": ("GPU-a", str(near))})
    if not (child := os.fork()):
        topology.bind_near("GPU-a", is_bound=False, system=system)
        inherited = os.popen("taskset -cp $$").read() if os.path.exists("/usr/bin/taskset") else f": {near}"
        os._exit(os.sched_getaffinity(0) != {near} or inherited.split(":")[-1].strip() != str(near))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.sched_getaffinity(0) == allowed
