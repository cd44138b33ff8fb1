"""Nodes of which one differs: it is named, with what it shows and what was asked of it, and no other is."""

import dataclasses
from typing import Any

import pytest

from megatron_fanformer.nodes.facts import DRIVER, Facts, Gpu, facts_from_plain
from megatron_fanformer.nodes.judgement import Links, judge
from megatron_fanformer.nodes.links import rounds
from megatron_fanformer.nodes.verb import CheckConfig

GPU = Gpu(name="H100", flops_per_second=700e12, clock_mhz=1500)
VERSIONS = {"torch": "2.13.0", "NCCL": "2.27.3"}
SICK = 2


def node(number: int, **changes: Any) -> Facts:
    values: dict[str, Any] = {"versions": dict(VERSIONS), "cores": 64, "gpus": [GPU] * 8, "doing": "done"}
    return Facts(node=f"node-{number}", **{**values, **changes})


def slow(**changes: Any) -> dict[str, Any]:
    return {"gpus": [*[GPU] * 3, dataclasses.replace(GPU, **changes), *[GPU] * 4]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (slow(flops_per_second=590e12), "GPU 3 multiplies at 590 TFLOP/s, below 0.85 of the median (595)"),
        (slow(clock_mhz=1270), "GPU 3 runs at 1270 MHz, below 0.85 of the median (1275)"),
        (slow(name="A100"), "GPU 3 is a A100, and most are H100"),
        ({"gpus": [GPU] * 7}, "it shows 7 GPUs, and on most nodes 8"),
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, "torch is 2.12.1, and on most nodes 2.13.0"),
        ({"versions": {"torch": "2.13.0"}}, "NCCL is missing, and on most nodes 2.27.3"),
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


def test_a_node_without_nvidia_smi_is_not_blamed_for_the_driver_it_cannot_tell() -> None:
    told = {**VERSIONS, DRIVER: "580.95.05"}
    found = {number: node(number, versions=told if number == SICK else VERSIONS) for number in range(4)}
    assert all(verdict.is_healthy for verdict in judge(found, {}, CheckConfig()).values())
    found |= {number: node(number, versions={**told, DRIVER: "570.1"}) for number in (0, 1)}
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
        number: {(number + 1) % count: [rates[number]], (number - 1) % count: [rates[number - 1]]}
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
    assert all("see its network" in verdicts[number].problems[0] for number in sick)


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


def test_facts_survive_their_message() -> None:
    assert facts_from_plain(dataclasses.asdict(node(1, shared_file="/a", shared_text="b"))) == node(
        1, shared_file="/a", shared_text="b"
    )
