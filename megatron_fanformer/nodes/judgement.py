"""Judgement of which nodes are fit to join a run: each by itself, and compared with the others."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_fanformer.nodes.expectations import (
    CAUSES,
    LEAST_SHARE,
    adapters_text,
    network_rates,
    tcp_problem,
    within_node_problems,
)
from megatron_fanformer.nodes.facts import DRIVER, Facts
from megatron_fanformer.nodes.verb import CheckConfig


@dataclass(kw_only=True)
class Rates:
    """Bytes per second of a collective with another node; 0 for one that did not finish."""

    alone: list[float]
    """For each GPU by itself (one number where there is none)."""
    together: float | None = None
    """For each where all GPUs send at once; None where there is one."""


Links = dict[int, Rates]
"""By the other node's number."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The findings about a node."""

    node: str
    problems: list[str] = field(default_factory=list)
    facts: Facts | None = None
    notes: list[str] = field(default_factory=list)
    """What a reader should know, though the node may join."""
    bandwidth: list[float] = field(default_factory=list)
    """Bytes per second of its better link, for each GPU."""

    @property
    def is_healthy(self) -> bool:
        """Return whether the node may join."""
        return not self.problems

    def line(self) -> str:
        """Return the verdict for a reader."""
        if self.problems:
            return f"{self.node}: unhealthy: {'. And: '.join(self.problems)}"
        assert self.facts is not None
        shown = []
        if gpus := self.facts.gpus:
            slowest = min(gpu.flops_per_second for gpu in gpus)
            shown = [f"{len(gpus)} × {gpus[0].name}", f"{slowest / 1e12:.0f} TFLOP/s and more"]
        elif self.facts.flops_per_second is not None:
            shown = [f"{self.facts.cores} cores", f"{self.facts.flops_per_second / 1e9:.0f} GFLOP/s"]
        if self.facts.bus_bytes_per_second is not None:
            shown.append(f"{self.facts.bus_bytes_per_second / 1e9:.0f} GB/s among them")
        if self.bandwidth:
            by = f" by {self.facts.network}" if self.facts.network else ""
            shown.append(f"{min(self.bandwidth) / 1e9:.2f} GB/s between nodes{by}")
        return "; ".join([f"{self.node}: healthy ({', '.join(shown)})", *self.notes])

    def as_plain(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"node": self.node, "healthy": self.is_healthy, **asdict(self)}


def judge(found: dict[int, Facts], links: dict[int, Links], config: CheckConfig) -> dict[int, Verdict]:
    """Return the verdicts on the nodes that answered, by number.

    Args:
        links: of the nodes that measured them.
    """
    verdicts = {}
    usual = _Usual(found.values())
    bandwidths = {number: _best(links.get(number, {})) for number in found}
    usual_bandwidth = statistics.median_high([min(rates.alone) for rates in bandwidths.values() if rates] or [0.0])
    for number, facts in found.items():
        problems = [
            *facts.problems,
            *_versions(facts, usual),
            *_equipment(facts, usual, config),
            *_rates(facts, usual, config),
            *within_node_problems(facts),
            *_network(facts, bandwidths[number], usual_bandwidth, config),
        ]
        notes = [f"not checked: {what}" for what in facts.unseen]
        rates, is_tcp_meant = bandwidths[number], config.minimum_bandwidth is not None
        if rates is None and not is_tcp_meant and (tcp := tcp_problem(facts)):
            notes.append(f"among several nodes: {tcp}")
        bandwidth = [] if rates is None else rates.alone
        verdicts[number] = Verdict(node=facts.node, problems=problems, facts=facts, notes=notes, bandwidth=bandwidth)
    return verdicts


class _Usual:
    """The facts of most nodes, or their median; with a tie, the first node's."""

    def __init__(self, found: Iterable[Facts]) -> None:
        nodes = list(found)
        self.count = len(nodes)
        names = dict.fromkeys(name for facts in nodes for name in facts.versions)
        self.versions = {
            name: _most([_version(facts, name) for facts in nodes if _version_counts(facts, name)]) for name in names
        }
        self.gpus: int = _most([len(facts.gpus) for facts in nodes])
        self.cores: int = _most([facts.cores for facts in nodes])
        self.adapters: str = _most([adapters_text(facts) for facts in nodes])
        gpus = [gpu for facts in nodes for gpu in facts.gpus]
        self.gpu_name = _most([gpu.name for gpu in gpus]) if gpus else None
        self.gpu_rate = statistics.median([gpu.flops_per_second for gpu in gpus] or [0.0])
        self.clock = statistics.median([gpu.clock_mhz for gpu in gpus if gpu.clock_mhz is not None] or [0.0])
        rates = [facts.flops_per_second for facts in nodes if facts.flops_per_second is not None]
        self.processor_rate = statistics.median_high(rates or [0.0])  # of two nodes one may be slow


def _most(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _versions(facts: Facts, usual: _Usual) -> list[str]:
    return [
        f"{name} is {_version(facts, name)}, and on most nodes {version}; install the same everywhere"
        for name, version in usual.versions.items()
        if facts.versions and _version_counts(facts, name) and _version(facts, name) != version
    ]


def _version(facts: Facts, name: str) -> str:
    return facts.versions.get(name, "missing")


def _version_counts(facts: Facts, name: str) -> bool:
    """Return whether a node's version counts: a GPU works without nvidia-smi, which reports the driver's."""
    return name in facts.versions or name != DRIVER


def _equipment(facts: Facts, usual: _Usual, config: CheckConfig) -> list[str]:
    expected = usual.gpus if config.gpus is None else config.gpus
    found = []
    if len(facts.gpus) != expected:
        why = "on most nodes" if config.gpus is None else "by --gpus"
        found.append(f"it shows {len(facts.gpus)} GPUs, and {why} {expected}; see dmesg and nvidia-smi there")
    found += [
        f"GPU {gpu.number} is a {gpu.name}, and most are {usual.gpu_name}; leave the node out"
        for gpu in facts.gpus
        if gpu.name != usual.gpu_name
    ]
    if (adapters := adapters_text(facts)) != usual.adapters:
        found.append(f"its network adapters are {adapters}, and on most nodes {usual.adapters}; see ibstat there")
    if facts.cores != usual.cores:
        found.append(f"it gives this process {facts.cores} cores, and most nodes {usual.cores}; request the same")
    return found


def _rates(facts: Facts, usual: _Usual, config: CheckConfig) -> list[str]:
    found = []
    for gpu in facts.gpus:
        rate, least = gpu.flops_per_second / 1e12, config.tolerance * usual.gpu_rate / 1e12
        if rate < least:
            found.append(
                f"GPU {gpu.number} multiplies at {rate:.0f} TFLOP/s, below {config.tolerance:g} of the median "
                f"({least:.0f}); see `nvidia-smi -q -d PERFORMANCE` there for what slows it down"
            )
        if gpu.clock_mhz is not None and gpu.clock_mhz < config.tolerance * usual.clock:
            found.append(
                f"GPU {gpu.number} runs at {gpu.clock_mhz:.0f} MHz, below {config.tolerance:g} of the median "
                f"({config.tolerance * usual.clock:.0f}); see `nvidia-smi -q -d CLOCK,PERFORMANCE` there"
            )
        if gpu.clock_mhz is not None and gpu.most_mhz is not None and gpu.clock_mhz < LEAST_SHARE * gpu.most_mhz:
            found.append(
                f"GPU {gpu.number} runs at {gpu.clock_mhz:.0f} MHz under load, below half of its highest "
                f"({gpu.most_mhz:.0f}); see `nvidia-smi -q -d CLOCK,PERFORMANCE` there"
            )
    own = facts.flops_per_second
    if own is not None and own < config.tolerance * usual.processor_rate:
        found.append(
            f"its cores multiply at {own / 1e9:.0f} GFLOP/s, below {config.tolerance:g} of the nodes' median "
            f"({config.tolerance * usual.processor_rate / 1e9:.0f}); see what else runs there"
        )
    return found


def _best(links: Links) -> Rates | None:
    """Return the better of a node's links, GPU by GPU: of a slow one, the other end may be the cause."""
    if not links:
        return None
    alone = [max(rates) for rates in zip(*(rates.alone for rates in links.values()), strict=False)]
    together = [rates.together for rates in links.values() if rates.together is not None]
    return Rates(alone=alone, together=max(together, default=None))


def _network(facts: Facts, best: Rates | None, usual: float, config: CheckConfig) -> list[str]:
    if best is None:
        return []
    if config.minimum_bandwidth is None:
        median = (LEAST_SHARE * usual, "half of the nodes' median")
        alone, together = [median], []
        if (expected := network_rates(facts)) is not None:
            halves = [(LEAST_SHARE * rate, f"half of its adapters' {rate / 1e9:.3g} GB/s") for rate in expected]
            alone, together = [halves[0], median], [halves[1]]  # the median is of GPUs by themselves
        tcp = tcp_problem(facts)
    else:
        alone = together = [(config.minimum_bandwidth * 1e9, "--minimum-bandwidth")]
        tcp = None
    causes = "by TCP, as it is" if tcp else CAUSES if facts.gpus else "see its network"
    found = [tcp] if tcp else []
    slow = [
        problem
        for gpu, rate in enumerate(best.alone)
        for problem in _too_slow(rate, alone, f" from GPU {gpu}" if len(best.alone) > 1 else "", causes)
    ]
    if len(slow) == len(best.alone) > 1 and max(best.alone) > 0:  # then one line says it
        slow = _too_slow(max(best.alone), alone, " from each GPU, the fastest too,", causes)
    found += slow
    if best.together is not None:
        found += _too_slow(best.together, together, " for each GPU, all sending at once,", causes)
    return found


def _too_slow(rate: float, limits: list[tuple[float, str]], place: str, causes: str) -> list[str]:
    if rate == 0:
        return [f"no collective with another node{place} came to its end; see its network"]
    for least, what in limits:
        if rate < least:
            return [
                f"a collective with another node{place} moves {rate / 1e9:.3g} GB/s, below {what} ({least / 1e9:.3g}); "
                f"{causes}"
            ]
    return []
