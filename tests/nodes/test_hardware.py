"""What nvidia-smi, /sys, the kernel's log and NCCL's say of a node, by outputs made after their documentation.

nvidia-smi's manual page (`--query-gpu`, `--query-remapped-rows`), NVIDIA's "Xid errors", the kernel's
Documentation/ABI/stable/sysfs-class-infiniband, and logs of NCCL in its issues.
"""

import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from megatron_fanformer.nodes import hardware
from megatron_fanformer.nodes.hardware import Adapter
from tests.small_runs import write_program

NOW = datetime(2026, 11, 26, 12, tzinfo=timezone.utc)
JOURNAL = """2026-11-25T10:00:00+0000 node-3 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.
2026-11-25T23:10:04+0000 node-3 kernel: NVRM: Xid (PCI:0000:8a:00): 48, pid='<unknown>', name=<unknown>, DBE
2026-11-25T23:10:05+0000 node-3 kernel: NVRM: Xid (PCI:0000:8a:00): 63, pid='<unknown>', name=<unknown>, Row Remapper
2026-11-26T01:10:05+0000 node-3 kernel: NVRM: Xid (PCI:0000:9d:00): 13, pid=5182, name=python, Graphics SM Exception
2026-11-26T02:10:05+0000 node-3 kernel: mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged
2026-11-26T03:10:05+0000 node-3 kernel: NVRM: Xid (PCI:0000:8a:00): 48, pid='<unknown>', name=<unknown>, DBE
"""
DMESG = (
    "2026-11-26T04:00:00,123456+00:00 NVRM: Xid (PCI:0000:9d:00): 119, pid=5182, name=python, Timeout waiting for RPC"
)


def test_xids_of_the_hardware_within_a_day() -> None:
    problems = list(hardware.xid_problems(f"{JOURNAL}{DMESG}\n[  12.5] NVRM: Xid (PCI:0000:9d:00): 74, pid=1\n", NOW))
    assert [problem.split(";")[0] for problem in problems] == [
        "GPU 0000:8a:00 reported Xid 48 2 times within 24 hours",
        "GPU 0000:9d:00 reported Xid 119 once within 24 hours",
        "GPU 0000:9d:00 reported Xid 74 once within 24 hours",  # of an unknown time
    ]


def test_counters_of_gpus() -> None:
    lines = ["0, 16, 16, 0", "1, 8, 16, 0", "2, 16, 16, 3", "3, [N/A], [N/A], [N/A]"]
    assert [problem.split(";")[0].split(":")[0] for problem in hardware.health_problems(lines)] == [
        "GPU 1 has a PCIe link of 8 lanes, and may have 16",
        "GPU 2 has counted 3 uncorrectable memory errors since its driver was loaded",
    ]
    lines = ["00000000:1B:00.0, No, No", "00000000:8A:00.0, Yes, No", "00000000:9D:00.0, 0, 1", "x, [N/A], [N/A]"]
    assert [problem.split(" of its")[0] for problem in hardware.remapping_problems(lines)] == [
        "GPU 00000000:8a:00.0 replaces a broken row",
        "GPU 00000000:9d:00.0 could not replace a broken row",
    ]


def write_port(system: Path, adapter: str, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
    port = system / hardware.ADAPTERS / adapter / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text(f"{rate}\n")


def test_adapters_that_are_up(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_1", rate="100 Gb/sec (4X EDR)")
    write_port(tmp_path, "mlx5_0")
    write_port(tmp_path, "mlx5_2", state="1: DOWN")
    assert hardware.adapters(tmp_path) == [
        Adapter(name="mlx5_0:1", bytes_per_second=50e9),
        Adapter(name="mlx5_1:1", bytes_per_second=12.5e9),
    ]
    assert hardware.adapters(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("log", "network"),
    [
        (
            "node-3:77:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nnode-3:77:90 [0] NCCL INFO Using network IB\n",
            "IB",
        ),
        (
            "node-3:77:90 [0] NCCL INFO Failed to open libibverbs.so[.1]\nn:7:9 [0] NCCL INFO Using network Socket",
            "Socket",
        ),
        ("node-3:77:90 [0] NCCL INFO Assigned NET plugin AWS Libfabric to comm\n", "AWS"),
        ("", None),
    ],
)
def test_the_network_that_nccl_chose(log: str, network: str | None) -> None:
    assert hardware.network_of_log(log) == network


def test_what_cannot_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the programs, or the right to the kernel's log; and a log that is larger than a pipe."""
    monkeypatch.setenv("PATH", str(tmp_path))
    problems, unseen = hardware.find_faults()
    assert problems == [] and [what.split(" (")[0] for what in unseen] == ["PCIe links and ECC errors", "Xid errors"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    write_program(tmp_path / "journalctl", "exit 0")
    write_program(tmp_path / "nvidia-smi", '[[ $1 == --query-gpu* ]] && echo "0, 8, 16, 0" || exit 2')
    write_program(tmp_path / "dmesg", f"for _ in {{1..20000}}; do echo noise; done; echo '{DMESG}'")
    monkeypatch.setattr(hardware, "XID_HOURS", 24 * 365 * 100)
    problems, unseen = hardware.find_faults()
    assert unseen == [] and [problem[:5] for problem in problems] == ["GPU 0", "GPU 0"]
