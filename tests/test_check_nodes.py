"""`examples/check_nodes.py`: what it marks, what it reads of other programs, and its all-reduces between real ranks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_fanformer.runtime.device import RankAddress
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import ROOT, RunOnRanks, start_program, write_program

SCRIPT = ROOT / "examples" / "check_nodes.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_nodes", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(rank: int, **figures: float) -> dict[str, Any]:
    """Of a rank of two on its node."""
    return {
        "node": f"node-{rank // 2}",
        "figures": {"TFLOP/s": 6e14, "GiB free": 79 * 2**30, "GB/s within": 4e11, "GB/s between": 3e11, **figures},
        "versions": {"torch": "2.11.0", "NCCL": "2.28"},
        "errors": [],
    }


def test_nodes_alike_are_not_marked_and_show_their_least_figures() -> None:
    rows = loaded().compared([facts(0, **{"TFLOP/s": 5.9e14}), *map(facts, (1, 2, 3))], 2, 0.85)
    assert rows == [["node-0", "590", "79", "400", "300", ""], ["node-1", "600", "79", "400", "300", ""]]


@pytest.mark.parametrize("name", ["TFLOP/s", "GiB free", "GB/s within", "GB/s between"])
def test_a_rank_below_the_tolerance_marks_its_node(name: str) -> None:
    ranks = [facts(rank) for rank in range(6)]
    value = ranks[3]["figures"][name]
    for share, marked in ((0.86, False), (0.84, True)):
        ranks[3]["figures"][name] = share * value
        wrong = [row[-1] for row in loaded().compared(ranks, 2, 0.85)]
        assert wrong[0] == wrong[2] == "" and wrong[1].startswith(f"{name} of rank 3 is ") == marked


def test_another_version_and_errors_mark_a_node() -> None:
    ranks = [facts(rank) for rank in range(6)]
    ranks[5]["versions"]["NCCL"] = "2.27"
    ranks[0]["errors"] = ["GPU 0000:03:00 had Xid 79"]
    wrong = [row[-1] for row in loaded().compared(ranks, 2, 0.85)]
    assert wrong == ["GPU 0000:03:00 had Xid 79", "", "NCCL of rank 5 is 2.27, and of most 2.28"]


LOG = """
2026-11-25T01:02:03+0000 node kernel: NVRM: Xid (PCI:0000:03:00): 79, pid=0, GPU has fallen off the bus.
2026-11-25T01:02:04+0000 node kernel: NVRM: Xid (PCI:0000:03:00): 79, pid=0, GPU has fallen off the bus.
2026-11-25T01:02:05+0000 node kernel: NVRM: Xid (PCI:0000:04:00): 31, pid=77, name=python3
"""


@pytest.mark.parametrize("program", ["journalctl", "dmesg"])
def test_errors_are_read_of_the_drivers_program_and_the_kernels_log(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Xid 31 is a program's own fault; GPU 0 counts no errors, and GPU 2 reports none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    write_program(tmp_path / "nvidia-smi", 'printf "0, 0\\n1, 12\\n2, [N/A]\\n"', interpreter="/bin/bash")
    write_program(tmp_path / program, f"printf '%s' '{LOG}'", interpreter="/bin/bash")
    assert loaded().gpu_errors() == ["GPU 1 has 12 uncorrectable memory errors", "GPU 0000:03:00 had Xid 79"]


def rates(rank_address: dict[str, Any]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    address = RankAddress(rank=dist.get_rank(), local_rank=0, master_address="", master_port=0, **rank_address)
    result: dict[str, float] = loaded().bus_rates(address, torch.device("cpu"))
    return result


@pytest.mark.parametrize(("world", "local", "kinds"), [(3, 1, {"between"}), (4, 2, {"within", "between"})])
def test_ranks_measure_within_nodes_and_between_neighbors(
    world: int, local: int, kinds: set[str], run_on_ranks: RunOnRanks
) -> None:
    for measured in run_on_ranks(world, rates, {"world_size": world, "local_world_size": local}):
        assert {name.removeprefix("GB/s ") for name in measured} == kinds
        assert all(1e6 < rate < 1e12 for rate in measured.values())


@pytest.mark.full  # a launcher and two processes import torch
def test_under_torchrun_a_row_is_printed_for_the_node() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    node = start_program(sys.executable, *torchrun, str(SCRIPT), "--tolerance", "0.001")
    printed, errors = node.communicate(timeout=PATIENCE_SECONDS)
    assert node.returncode == 0, errors
    heads, row = printed.splitlines()
    assert heads.split()[:2] == ["node", "TFLOP/s"] and float(row.split()[1]) > 0 and row.split()[-1] == "-"
