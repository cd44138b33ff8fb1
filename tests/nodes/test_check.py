"""`check-node` in processes of its own: alone, and as nodes that meet, of which one hangs, differs or does not come."""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_fanformer.cli import main
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.nodes import check as check_module
from megatron_fanformer.nodes import collectives, facts
from megatron_fanformer.nodes.check import _Meeting, nodes_to_measure
from megatron_fanformer.nodes.facts import Facts
from megatron_fanformer.nodes.verb import CheckConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.device import RankAddress
from megatron_fanformer.runtime.meeting import hosted_store
from tests.nodes.test_hardware import write_port
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import ROOT, start_program

LIMIT = 60.0
AS_PLANTED = """
import os, sys, time
from megatron_fanformer.nodes import check, facts
check.LINKS_SECONDS = 60.0
planted = sys.argv.pop(1)
find = facts._find_versions
def find_versions(own):
    find(own)
    if planted == "hangs":
        time.sleep(600)
    if planted == "other torch":
        own.versions["torch"] = "1.0"
facts._find_versions = find_versions
if planted == "dies":
    from megatron_fanformer.nodes import links
    links.measure_links = lambda *_: os._exit(9)
if planted == "other folder":
    read = facts.Path.read_text
    def read_text(file, **options):
        return "of another file system" if file.name.startswith(".check-node") else read(file, **options)
    facts.Path.read_text = read_text
if planted == "tcp":  # a node with two H100s and two adapters that NCCL does not use: over gloo
    from pathlib import Path
    from megatron_fanformer.nodes import hardware, links
    rate, system = links.rate_between, Path(os.environ["FAKE_SYSTEM"])
    def find_gpus(own):
        h100 = {"name": "NVIDIA H100 80GB HBM3", "flops_per_second": 7e14, "clock_mhz": 1500}
        own.gpus = [facts.Gpu(number=number, **h100) for number in range(2)]
    def find_collective(own):
        own.network = hardware.network_of_log("node:1:2 [0] NCCL INFO Using network Socket")
        own.bus_bytes_per_second = 3.5e11
    facts._has_gpus, facts._find_gpus, facts._find_collective = lambda _: True, find_gpus, find_collective
    facts.adapters = lambda: hardware.adapters(system)
    links.rate_between = lambda store, name, rank, gpus: rate(store, name, rank, [])
from megatron_fanformer.__main__ import entry_point
entry_point()
"""
NO_RATES = ("--tolerance", "0.001", "--minimum-bandwidth", "1e-6")
"""Two nodes on one machine disturb one another: their rates are not what is tested."""


def start_node(number: int, count: int, port: int, planted: str, *options: str) -> "subprocess.Popen[str]":
    environment = {
        **{"RANK": str(2 * number), "WORLD_SIZE": str(2 * count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURMD_NODENAME": f"node-{number}"},
        **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    }
    return start_program(sys.executable, "-c", AS_PLANTED, planted, "check-node", *options, environment=environment)


def check(
    tmp_path: Path,
    planted: list[str],
    *,
    missing: int = 0,
    limit: float = LIMIT,
    rules: tuple[str, ...] = NO_RATES,
) -> tuple[list[int], Any, str]:
    """Check nodes with planted faults; their exit codes, node 0's report, and the healthy ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "healthy"
    options = ("--json", "--folder", str(tmp_path), "--output", str(output), "--time-limit", str(limit), *rules)
    count = len(planted) + missing
    nodes = [start_node(number, count, port, fault, *options) for number, fault in enumerate(planted)]
    printed = [node.communicate(timeout=PATIENCE_SECONDS) for node in nodes]
    assert [out for out, _ in printed[1:]] == [""] * (len(nodes) - 1), printed
    assert not list(tmp_path.glob(".check-node*"))
    return [node.returncode for node in nodes], json.loads(printed[0][0]), output.read_text()


@pytest.mark.full  # two processes import torch
def test_two_nodes_meet_and_are_found_healthy(tmp_path: Path) -> None:
    codes, report, healthy = check(tmp_path, ["", ""])
    assert codes == [0, 0] and report["healthy"], report
    assert healthy == "node-0\nnode-1\n"
    for node in report["nodes"]:
        assert node["facts"]["flops_per_second"] > 1e8 and node["facts"]["versions"]["torch"]
        [rate] = node["bandwidth"]
        assert 1e6 < rate < 1e12


@pytest.mark.full
@pytest.mark.parametrize(
    ("planted", "missing", "limit", "problem"),
    [
        ("other torch", 0, LIMIT, "torch is 1.0"),
        ("hangs", 0, 40.0, "it was still at its versions after 40 s"),
        ("", 1, 40.0, "it did not answer within 40 s"),
    ],
)
def test_a_node_that_differs_hangs_or_does_not_come_is_left_out(
    planted: str, missing: int, limit: float, problem: str, tmp_path: Path
) -> None:
    codes, report, healthy = check(tmp_path, ["", "", *([] if missing else [planted])], missing=missing, limit=limit)
    assert codes == [1] * len(codes) and not report["healthy"]
    assert [node["healthy"] for node in report["nodes"]] == [True, True, False]
    assert [line.startswith(problem) for line in report["nodes"][2]["problems"]] == [True], report
    assert healthy == "node-0\nnode-1\n"


@pytest.mark.full
def test_a_node_that_dies_while_links_are_measured_is_left_out(tmp_path: Path) -> None:
    """Its neighbours give up its links at the first failure, and have measured their own by then."""
    codes, report, healthy = check(tmp_path, ["", "", "dies"])
    assert codes == [1, 1, 9] and healthy == "node-0\nnode-1\n"
    assert report["nodes"][2]["problems"][0].startswith("it did not answer within 60 s after its links were to be")
    for node in report["nodes"][:2]:
        assert node["healthy"] and node["bandwidth"][0] > 1e6, report


@pytest.mark.parametrize(
    ("torch", "limit", "problem"),
    [
        ("import time; time.sleep(6000)", "2", "it was still at importing torch after 2 s; leave it out"),
        (
            "raise ImportError('libcudart.so.13: no file')",
            str(PATIENCE_SECONDS),
            "importing torch failed (libcudart.so.13: no file); leave the node out",
        ),
    ],
)
def test_a_node_that_cannot_import_torch_gets_its_verdict(torch: str, limit: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = (sys.executable, "-m", "megatron_fanformer", "check-node", "--time-limit", limit)
    node = start_program(*command, environment=environment)
    printed, errors = node.communicate(timeout=PATIENCE_SECONDS)
    assert (node.returncode, errors) == (1, "")
    [line] = printed.splitlines()
    assert line == f"{socket.gethostname()}: unhealthy: {problem}, and have it looked at"


@pytest.mark.full
def test_a_fallback_to_tcp_is_named_with_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives are real, over gloo's sockets; what the nodes show of themselves is not."""
    for adapter in ("mlx5_0", "mlx5_1"):
        write_port(tmp_path, adapter)
    monkeypatch.setenv("FAKE_SYSTEM", str(tmp_path))
    codes, report, healthy = check(tmp_path, ["tcp", "tcp"], rules=())
    assert codes == [1, 1] and healthy == ""
    for node in report["nodes"]:
        tcp, *slow = node["problems"]
        assert tcp.startswith("NCCL sends by TCP, and its adapters (2 × 400 Gb/s) could by RDMA: in a container")
        assert [problem.partition(" moves ")[0].rpartition("another node")[2] for problem in slow] == [
            " from each GPU, the fastest too,",
            " for each GPU, all sending at once,",
        ]
        assert all(problem.endswith("below half of its adapters' 50 GB/s (25); by TCP, as it is") for problem in slow)
        assert all(1e6 < rate < 25e9 for rate in node["bandwidth"])


@pytest.mark.full
def test_a_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    """Node 0 reads what the others wrote, and here finds something else."""
    codes, report, _ = check(tmp_path, ["other folder", ""])
    assert codes == [1, 1]
    assert all("is not what node-0 reads there" in node["problems"][0] for node in report["nodes"])


def test_a_shared_folder_that_hangs_on_the_first_node_is_named_in_time(tmp_path: Path) -> None:
    """By a named pipe, which nobody opens to write."""
    found = {number: Facts(node=f"node-{number}", shared_text="text") for number in range(3)}
    for number in (0, 2):
        found[number].shared_file = str(tmp_path / str(number))
        os.mkfifo(tmp_path / str(number))
    check_module._read_shared_files(found, 0.1)
    [hangs] = found[0].problems
    assert hangs.startswith(f"it was still reading what the nodes wrote into {tmp_path} after 0.1 s; leave it out")
    assert all(not found[number].problems for number in (1, 2))
    for number in (0, 2):
        (tmp_path / str(number)).write_text("text")  # lets it go on
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize(("hangs", "doing"), [("file_problems", "looking at"), ("write_atomically", "writing")])
def test_a_file_system_that_hangs_under_the_output_is_named_in_time(
    hangs: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, config = threading.Event(), SimpleNamespace(**vars(CheckConfig(output=tmp_path / "healthy")))
    config.time_limit = 0.1 if hangs == "file_problems" else PATIENCE_SECONDS

    def find_facts(facts: Facts, _folder: Path | None) -> None:
        facts.doing, config.time_limit = "done", 0.1

    monkeypatch.setattr(check_module, "find_facts", find_facts)
    monkeypatch.setattr(check_module, hangs, lambda *_, **__: released.wait() and [])
    message = f"^{devices.node_name()}: unhealthy: it was still {doing} {config.output} after 0.1 s; see whether that"
    with pytest.raises(FanformerError, match=message):
        check_module._check_nodes(cast(CheckConfig, config))
    released.set()
    wait_until(lambda: all(thread.name != check_module.WORKER for thread in threading.enumerate()))


def test_of_two_paths_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    released, folder = threading.Event(), mock.MagicMock()
    folder.is_dir, folder.__str__.return_value = released.wait, "shared"
    config = SimpleNamespace(**vars(CheckConfig(output=tmp_path / "healthy")) | {"folder": folder, "time_limit": 0.1})
    with pytest.raises(FanformerError, match=r"still looking at shared after 0\.1 s"):
        check_module._check_paths(cast(CheckConfig, config), check_module.JUDGE, 1)
    released.set()
    wait_until(lambda: all(thread.name != check_module.WORKER for thread in threading.enumerate()))


def test_a_check_that_torchrun_repeats_reads_no_answer_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the launcher's store, which outlives them."""
    store = hosted_store("127.0.0.1", 0, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    address = RankAddress(
        rank=0, world_size=2, local_rank=0, local_world_size=1, master_address="127.0.0.1", master_port=store.port
    )
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        first, second = (_Meeting(address, number, 2, PATIENCE_SECONDS) for number in range(2))
        assert first.collect("facts", [1], 0.0) == {}
        second.publish("facts", restart)
        assert first.collect("facts", [1], PATIENCE_SECONDS) == {1: restart}
        second.other_client().set("link", restart)
        assert first.other_client().get("link") == restart.encode()


def test_who_does_not_come_in_time_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Node 0 of three, alone."""

    def find_facts(facts: Facts, _folder: Path | None) -> None:
        facts.doing = "done"

    address = RankAddress(
        rank=0, world_size=6, local_rank=0, local_world_size=2, master_address="127.0.0.1", master_port=0
    )
    output = tmp_path / "healthy"
    with (
        mock.patch.object(devices, "rank_address", lambda: address),
        mock.patch.object(check_module, "find_facts", find_facts),
    ):
        assert main(["check-node", "--time-limit", "0.5", "--output", str(output)]) == 1
        assert main(["check-node", "--time-limit", "0.5", "--output", str(tmp_path / "no" / "folder")]) == 2
    printed, errors = capsys.readouterr()
    assert printed.count("node 1 of 3") == 1  # nothing was looked at for names that could not be written
    assert f"--output {tmp_path / 'no' / 'folder'} is not a file in a folder that exists" in errors
    missing = "unhealthy: it did not answer within 0.5 s; leave it out, and see whether it is up"
    assert printed.splitlines()[1:3] == [f"node {number} of 3: {missing}" for number in (1, 2)]
    assert errors.splitlines()[0] == "megatron-fanformer: 2 of 3 nodes are unhealthy; leave them out"
    assert output.read_text() == f"{devices.node_name()}\n"


def test_the_first_node_waits_for_those_whose_links_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may be the store's; they would say that it does not answer."""
    meeting = _Meeting(None, check_module.JUDGE, 3, 0.0)
    meeting.store.set("facts-1", json.dumps(asdict(Facts(doing="GPU 3"))))
    collect = mock.Mock(wraps=meeting.collect)
    monkeypatch.setattr(meeting, "collect", collect)
    monkeypatch.setattr(check_module, "ACKNOWLEDGED_SECONDS", 0.0)
    check_module._verdicts(meeting, Facts(doing="done"), {}, CheckConfig())
    what, numbers, _ = collect.call_args.args
    assert (what, list(numbers)) == ("acknowledged", [1])  # the third has not come


def test_a_node_alone_is_described_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-node", "--folder", str(tmp_path)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{socket.gethostname()}: healthy ({len(os.sched_getaffinity(0))} cores, ")
    assert main(["check-node", "--gpus", "8"]) == 1
    out, errors = capsys.readouterr()
    assert "it shows 0 GPUs, and by --gpus 8" in out and not errors


def test_a_node_with_fewer_gpus_takes_no_part_in_measuring_the_links() -> None:
    def node(gpus: int, doing: str = "done") -> Facts:
        return Facts(gpus=[mock.Mock()] * gpus, doing=doing)

    assert nodes_to_measure({0: node(8), 1: node(8), 2: node(0), 3: node(7), 4: node(8, "GPU 3")}) == ([0, 1], 8)
    assert nodes_to_measure({0: node(0), 1: node(8)}) == ([1], 8)
    assert nodes_to_measure({0: node(0), 1: node(0)}) == ([0, 1], 0)


def test_a_gpu_that_cannot_be_used_is_a_problem_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its load or at its work; those behind it are looked at, and reduce among them."""
    found, usable = Facts(), mock.Mock(number=2)
    lost, full = RuntimeError("CUDA error: uncorrectable ECC error\nhint"), RuntimeError("CUDA out of memory\nhint")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mock.Mock(side_effect=[lost, (100, 100), (100, 100)]))
    monkeypatch.setattr(facts, "_query_gpu", lambda number, field: [0.0])
    monkeypatch.setattr(facts, "_work_of", mock.Mock(side_effect=[full, usable]))
    facts._find_gpus(found)
    assert found.gpus == [usable]
    assert found.problems == [
        f"GPU {number} cannot be used ({reason}); leave the node out, and have it looked at"
        for number, reason in enumerate(("CUDA error: uncorrectable ECC error", "CUDA out of memory"))
    ]
    reduce = mock.Mock()
    monkeypatch.setattr(collectives, "rate_within_node", reduce)
    monkeypatch.setattr(devices, "log_nccl_to", mock.Mock())
    facts._find_collective(found)
    reduce.assert_called_once_with([2])


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--tolerance", "1.5"], "--tolerance is 1.5"),
        (["--minimum-bandwidth", "0"], "--minimum-bandwidth"),
        (["--gpus", "-1"], "--gpus is -1"),
        (["--time-limit", "nan"], "--time-limit is nan"),
        (["--time-limit", "inf", "--minimum-bandwidth", "inf"], "--time-limit is inf"),
        (["--folder", "/nowhere"], "--folder /nowhere is not a folder"),
    ],
)
def test_bad_options_are_refused(options: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-node", *options]) == 2
    assert value in capsys.readouterr().err
