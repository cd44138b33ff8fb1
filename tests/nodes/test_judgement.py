"""Nodes of which one differs: it is named, with what it shows and what was asked of it, and no other is."""

import dataclasses
from typing import Any

import pytest

from megatron_fanformer.nodes.expectations import WITHIN_NODE
from megatron_fanformer.nodes.facts import DRIVER, Facts, Gpu, facts_from_plain
from megatron_fanformer.nodes.hardware import Adapter
from megatron_fanformer.nodes.judgement import Links, Rates, judge
from megatron_fanformer.nodes.limits import ROUNDS
from megatron_fanformer.nodes.links import rounds
from megatron_fanformer.nodes.verb import CheckConfig
from tests.small_runs import ROOT

GPU = Gpu(number=0, name="H100", flops_per_second=700e12, clock_mhz=1500)
ADAPTER = Adapter(name="mlx5_0:1", bytes_per_second=50e9)
VERSIONS = {"torch": "2.13.0", "NCCL": "2.27.3"}
SICK = 2


def several(gpu: Gpu, count: int = 8) -> list[Gpu]:
    return [dataclasses.replace(gpu, number=number) for number in range(count)]


def node(number: int, **changes: Any) -> Facts:
    values: dict[str, Any] = {"versions": dict(VERSIONS), "cores": 64, "gpus": several(GPU), "doing": "done"}
    return Facts(node=f"node-{number}", **{**values, **changes})


def slow(**changes: Any) -> dict[str, Any]:
    """The fourth GPU."""
    gpus = several(GPU)
    return {"gpus": [*gpus[:3], dataclasses.replace(gpus[3], **changes), *gpus[4:]]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (slow(flops_per_second=590e12), "GPU 3 multiplies at 590 TFLOP/s, below 0.85 of the median (595)"),
        (slow(clock_mhz=1270), "GPU 3 runs at 1270 MHz, below 0.85 of the median (1275)"),
        (slow(clock_mhz=1400, most_mhz=2900), "GPU 3 runs at 1400 MHz under load, below half of its highest (2900)"),
        (slow(name="A100"), "GPU 3 is a A100, and most are H100"),
        ({"gpus": several(GPU, 7)}, "it shows 7 GPUs, and on most nodes 8"),
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, "torch is 2.12.1, and on most nodes 2.13.0"),
        ({"versions": {"torch": "2.13.0"}}, "NCCL is missing, and on most nodes 2.27.3"),
        ({"adapters": [ADAPTER]}, "its network adapters are 1 × 400 Gb/s, and on most nodes none; see ibstat there"),
        ({"cores": 32}, "it gives this process 32 cores, and most nodes 64"),
        ({"problems": ["GPU 0 is busy"]}, "GPU 0 is busy"),
    ],
)
def test_the_node_that_differs_is_named_and_no_other(changes: dict[str, Any], named: str) -> None:
    found = {number: node(number, **(changes if number == SICK else {})) for number in range(4)}
    verdicts = judge(found, {}, CheckConfig())
    assert [number for number, verdict in verdicts.items() if not verdict.is_healthy] == [SICK]
    [problem] = verdicts[SICK].problems
    assert problem.startswith(named)
    assert verdicts[SICK].line() == f"node-{SICK}: unhealthy: {problem}"
    assert verdicts[0].line() == "node-0: healthy (8 × H100, 700 TFLOP/s and more)"


@pytest.mark.parametrize(
    "changes", [{"flops_per_second": 590e12}, {"clock_mhz": 600, "most_mhz": 1980}, {"name": "A100"}]
)
def test_a_gpu_behind_one_that_cannot_be_used_keeps_its_number(changes: dict[str, Any]) -> None:
    _, *usable = slow(**changes)["gpus"]  # the first one is missing
    missing, *named = judge({0: node(0), 1: node(1), 2: node(2, gpus=usable)}, {}, CheckConfig())[2].problems
    assert missing.startswith("it shows 7 GPUs")
    assert named and all(problem.startswith("GPU 3 ") for problem in named)


def test_a_node_without_nvidia_smi_is_not_blamed_for_the_driver_it_cannot_tell() -> None:
    message = {**VERSIONS, DRIVER: "580.95.05"}
    found = {number: node(number, versions=message if number == SICK else VERSIONS) for number in range(4)}
    assert all(verdict.is_healthy for verdict in judge(found, {}, CheckConfig()).values())
    found |= {number: node(number, versions={**message, DRIVER: "570.1"}) for number in (0, 1)}
    assert [number for number, verdict in judge(found, {}, CheckConfig()).items() if not verdict.is_healthy] == [SICK]


@pytest.mark.parametrize("changes", [slow(flops_per_second=600e12), slow(clock_mhz=1280)])
def test_what_is_within_the_tolerance_is_healthy(changes: dict[str, Any]) -> None:
    found = {number: node(number, **(changes if number == SICK else {})) for number in range(4)}
    assert all(verdict.is_healthy for verdict in judge(found, {}, CheckConfig()).values())


def test_of_two_processors_the_slower_one_is_named() -> None:
    found = {number: node(number, gpus=[], flops_per_second=rate) for number, rate in enumerate((80e9, 100e9))}
    assert [verdict.is_healthy for verdict in judge(found, {}, CheckConfig()).values()] == [False, True]
    assert all(verdict.is_healthy for verdict in judge(found, {}, CheckConfig(tolerance=0.75)).values())


def ring(rates: list[float]) -> dict[int, Links]:
    """Links between neighbours of a ring, each with the given rate on its one device."""
    count = len(rates)
    return {
        number: {
            (number + 1) % count: Rates(alone=[rates[number]]),
            (number - 1) % count: Rates(alone=[rates[number - 1]]),
        }
        for number in range(count)
    }


@pytest.mark.parametrize(
    ("rates", "least", "sick"),
    [
        ([50e9, 50e9, 50e9, 50e9], 45, []),
        ([50e9, 20e9, 20e9, 50e9], 45, [2]),  # both links of node 2
        ([50e9, 20e9, 50e9, 50e9], 45, []),  # one link: the nodes' other ones are as they should be
        ([50e9, 20e9, 20e9, 50e9], None, [2]),
        ([50e9, 30e9, 30e9, 50e9], None, []),
        ([50e9, 0.0, 0.0, 50e9], None, [2]),
        ([0.0, 0.0, 0.0, 0.0], None, [0, 1, 2, 3]),
    ],
)
def test_a_node_is_held_to_the_better_of_its_links(rates: list[float], least: float | None, sick: list[int]) -> None:
    verdicts = judge({number: node(number) for number in range(4)}, ring(rates), CheckConfig(minimum_bandwidth=least))
    assert [number for number, verdict in verdicts.items() if not verdict.is_healthy] == sick
    assert all("network" in verdicts[number].problems[0] for number in sick)


H100 = Gpu(number=0, name="NVIDIA H100 80GB HBM3", flops_per_second=700e12, clock_mhz=1500, most_mhz=1980)
EIGHT_ADAPTERS = [Adapter(name=f"mlx5_{number}:1", bytes_per_second=50e9) for number in range(8)]
FRONT_END = Adapter(name="mlx5_an0:1", bytes_per_second=12.5e9)  # for the hosts' own traffic


def of_two_nodes(rates: Rates, config: CheckConfig | None = None, **changes: Any) -> list[str]:
    """The problems of each of two like nodes."""
    values = {"gpus": several(H100), "adapters": [*EIGHT_ADAPTERS, FRONT_END], "network": "IB", **changes}
    links = {number: {1 - number: rates} for number in range(2)}
    first, second = judge(
        {number: node(number, **values) for number in range(2)}, links, config or CheckConfig()
    ).values()
    assert first.problems == second.problems
    return first.problems


@pytest.mark.parametrize(
    ("alone", "together", "changes", "named"),
    [
        (47e9, 44e9, {}, []),
        (24e9, 44e9, {}, ["from each GPU, the fastest too, moves 24 GB/s, below half of its adapters' 50 GB/s (25); "]),
        # One adapter carries all: each GPU by itself is as fast as it should be.
        (
            47e9,
            6e9,
            {},
            ["for each GPU, all sending at once, moves 6 GB/s, below half of its adapters' 50 GB/s (25); "],
        ),
        (47e9, 24e9, {"adapters": EIGHT_ADAPTERS[:4]}, []),  # half as many adapters as GPUs: 25 GB/s each
        (20e9, 18e9, {"adapters": []}, []),  # what a plugin's network can carry is not known
    ],
)
def test_a_network_is_held_to_its_adapters(
    alone: float, together: float, changes: dict[str, Any], named: list[str]
) -> None:
    """Both nodes are slow alike, so that a median says nothing."""
    problems = of_two_nodes(Rates(alone=[alone] * 8, together=together), **changes)
    assert len(problems) == len(named)
    assert all(part in problem for part, problem in zip(named, problems, strict=True))
    assert all("the usual causes, likeliest first: TCP in place of RDMA" in problem for problem in problems)


def test_the_gpu_whose_path_is_slow_is_named() -> None:
    [problem] = of_two_nodes(Rates(alone=[*[47e9] * 5, 20e9, *[47e9] * 2], together=40e9))
    assert "another node from GPU 5 moves 20 GB/s, below half of its adapters' 50 GB/s (25)" in problem


def test_tcp_in_place_of_rdma_is_named_before_its_effects() -> None:
    slow = Rates(alone=[3e9] * 8, together=0.5e9)
    tcp, *others = of_two_nodes(slow, network="Socket")
    assert tcp.startswith("NCCL sends by TCP, and its adapters (8 × 400 Gb/s, 1 × 100 Gb/s) could by RDMA")
    assert len(others) == 2 and all(problem.endswith("; by TCP, as it is") for problem in others)
    fast = Rates(alone=[40e9] * 8, together=40e9)  # large messages alone hide it
    assert of_two_nodes(fast, network="Socket") == [tcp]
    [unseen] = of_two_nodes(slow, network="Socket", adapters=[])
    assert "no RDMA adapter is visible here" in unseen and "state --minimum-bandwidth where TCP is meant" in unseen
    assert of_two_nodes(slow, CheckConfig(minimum_bandwidth=0.4), network="Socket") == []
    assert of_two_nodes(slow, network="Socket", adapters=[], gpus=[GPU]) == []  # of a kind that is not in the table


def test_a_node_alone_is_told_of_tcp_and_may_train() -> None:
    facts = node(0, gpus=several(H100), adapters=EIGHT_ADAPTERS, network="Socket", unseen=["Xid errors (no right to)"])
    [verdict] = judge({0: facts}, {}, CheckConfig()).values()
    assert verdict.is_healthy
    assert "; not checked: Xid errors (no right to); among several nodes: NCCL sends by TCP" in verdict.line()
    [meant] = judge({0: facts}, {}, CheckConfig(minimum_bandwidth=0.4)).values()
    assert meant.is_healthy and meant.line().endswith("; not checked: Xid errors (no right to)")


@pytest.mark.parametrize(
    ("gpu", "rate", "is_slow"),
    [
        ("NVIDIA H100 80GB HBM3", 229e9, True),
        ("NVIDIA H100 80GB HBM3", 231e9, False),
        ("NVIDIA H200", 200e9, True),
        ("NVIDIA H200 NVL", 20e9, False),  # bridges of two or four: no switch
        ("NVIDIA H100 PCIe", 20e9, False),
        ("NVIDIA A100-SXM4-80GB", 113e9, True),
        ("NVIDIA GB200", 215e9, True),
        ("NVIDIA B200", 217e9, False),
        ("NVIDIA L40S", 5e9, False),
    ],
)
def test_gpus_are_held_to_their_nvlink(gpu: str, rate: float, is_slow: bool) -> None:
    facts = node(0, gpus=several(dataclasses.replace(H100, name=gpu)), bus_bytes_per_second=rate)
    [verdict] = judge({0: facts}, {}, CheckConfig()).values()
    assert verdict.is_healthy is not is_slow
    assert is_slow == any(f"an all-reduce among its 8 GPUs moves {rate / 1e9:.3g} GB/s" in p for p in verdict.problems)


def test_the_page_has_the_expectations() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    for expected in WITHIN_NODE:
        assert f"| {expected.bytes_per_second / 1e9:.0f} |" in page and expected.source.split(" ")[-1] in page


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_each_neighbour_is_met_once_and_one_at_a_time(count: int) -> None:
    nodes = [10 * number for number in range(count)]
    parts = rounds(nodes)
    for pairs in parts:
        busy = [number for pair in pairs for number in pair]
        assert len(busy) == len(set(busy))
    wanted = {frozenset((nodes[number], nodes[(number + 1) % count])) for number in range(count)}
    met = [frozenset(pair) for pairs in parts for pair in pairs]
    assert set(met) == wanted and len(met) == len(wanted) and len(parts) == 2 - (count == 2) + count % 2
    assert len(parts) <= ROUNDS  # which the limit for all links follows


def test_facts_survive_their_message() -> None:
    facts = node(1, shared_file="/a", shared_text="b", adapters=[ADAPTER])
    assert facts_from_plain(dataclasses.asdict(facts)) == facts
