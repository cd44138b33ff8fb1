"""Steps of single ranks of a layout, run under fake tensors, beside what the formulas say of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fanformer.planning.communication import CommunicationLine, Total, communication, totals
from megatron_fanformer.planning.memory import rank_memory
from megatron_fanformer.sizing.estimate import Estimate
from megatron_fanformer.sizing.verb import ALL_STAGES
from megatron_fanformer.training.config import RunConfig

if TYPE_CHECKING:
    from megatron_fanformer.simulation.fake_rank import SimulatedRank

PEAK_TOLERANCE = 0.02
"""Tolerance of the memory formula, relative to the peak."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStage:
    """One simulated rank with local layers, and the formulas' figures for it."""

    rank: int
    stage: int
    micro_batches: int
    """Micro batches that it took: no more than show its peak."""
    peak_bytes: int
    formula_peak_bytes: int
    counted: Total
    """Counts of all its collectives in a step."""
    formula: Total
    seconds: float
    """Time that the simulation took."""
    differences: tuple[str, ...]
    """Differences between the two, one line each."""


def simulate_layout(estimate: Estimate, ranks: Sequence[int | str], *, processes: int) -> list[SimulatedStage]:
    """Run those ranks of a layout, or one of each of its stages.

    Args:
        processes: at a time; each takes less than a gigabyte.

    Raises:
        InputError: the configuration sets what cannot be simulated.
    """
    from megatron_fanformer.simulation.rank import first_rank_of_each_stage, simulate_ranks, with_few_micro_batches

    config, world_size = as_simulated(estimate.config), estimate.job.world_size
    numbers = [rank for rank in ranks if isinstance(rank, int)]
    if ALL_STAGES in ranks:
        numbers = first_rank_of_each_stage(config.parallel, world_size)
    few = with_few_micro_batches(config, world_size)
    found = simulate_ranks(few, world_size=world_size, ranks=numbers, processes=processes)
    return [_beside_formula(each) for each in found]


def as_simulated(config: RunConfig) -> RunConfig:
    """Return the configuration with local layers, the only ones that can be simulated."""
    kernels = dataclasses.replace(
        config.kernels,
        transformer_impl="local",
        gradient_accumulation_fusion=None,
        cuda_graph_impl="none",
        fused_single_qkv_rope=False,
    )
    return dataclasses.replace(
        config,
        kernels=kernels,
        parallel=dataclasses.replace(config.parallel, cp_comm_type="a2a" if config.parallel.exchanges_heads else None),
        precision=dataclasses.replace(config.precision, fp8=None, fp8_fan=False, first_last_layers_bf16=False),
        runtime=dataclasses.replace(config.runtime, device="auto"),
    )


def _beside_formula(simulated: "SimulatedRank") -> SimulatedStage:
    formula_peak = rank_memory(simulated.job, simulated.stage).total_bytes
    return SimulatedStage(
        rank=simulated.rank,
        stage=simulated.stage,
        micro_batches=simulated.job.num_micro_batches,
        peak_bytes=simulated.peak_bytes,
        formula_peak_bytes=formula_peak,
        counted=_sum(totals(simulated.collectives)),
        formula=_sum(totals(_lines(simulated))),
        seconds=simulated.seconds,
        differences=(*communication_differences(simulated), *peak_differences(simulated, formula_peak)),
    )


def _lines(simulated: "SimulatedRank") -> list[CommunicationLine]:
    """Return what the formula says that it communicates, by its number among its stage's ranks, which follow on one
    another.
    """
    job = simulated.job
    return communication(job, simulated.stage, simulated.rank % (job.world_size // job.stages))


def _sum(cells: dict[tuple[str, str], Total]) -> Total:
    return Total(sum(cell.calls for cell in cells.values()), sum(cell.message_bytes for cell in cells.values()))


def communication_differences(simulated: "SimulatedRank") -> list[str]:
    """Return a line for each kind of collective and group for which the formula has another number or other bytes."""
    formula_lines = _lines(simulated)
    formula, counted = totals(formula_lines), totals(simulated.collectives)
    ranks_by_formula = {line.group: line.ranks for line in formula_lines}
    ranks_counted = {line.group: line.ranks for line in simulated.collectives}
    return [
        *(
            f"{_where(simulated)}: {group} {kind}: counted {_shown(counted, group, kind)}, by formula "
            f"{_shown(formula, group, kind)}"
            for group, kind in sorted(formula.keys() | counted.keys())
            if formula.get((group, kind)) != counted.get((group, kind))
        ),
        *(
            f"{_where(simulated)}: {group} has {ranks_counted[group]} ranks, by formula {ranks_by_formula[group]}"
            for group in sorted(ranks_counted.keys() & ranks_by_formula.keys())
            if ranks_counted[group] != ranks_by_formula[group]
        ),
    ]


def peak_differences(simulated: "SimulatedRank", formula_bytes: int) -> list[str]:
    """Return one line if the memory formula's peak is off by more than `PEAK_TOLERANCE`."""
    error = formula_bytes / simulated.peak_bytes - 1
    if abs(error) <= PEAK_TOLERANCE:
        return []
    return [
        f"{_where(simulated)}: memory: counted a peak of {simulated.peak_bytes:,} bytes, by formula "
        f"{formula_bytes:,}, {error:+.1%}; at most {PEAK_TOLERANCE:.0%} is allowed"
    ]


def _where(simulated: "SimulatedRank") -> str:
    return f"stage {simulated.stage} (rank {simulated.rank} of {simulated.job.world_size})"


def _shown(sums: dict[tuple[str, str], Total], group: str, kind: str) -> str:
    calls, message_bytes = sums.get((group, kind), Total(0, 0))
    return f"{calls:,} calls of {message_bytes:,} bytes"
