"""What a simulated rank did against what the formulas say of it."""

from megatron_fanformer.planning.communication import Total, communication, totals
from megatron_fanformer.simulation.fake_rank import SimulatedRank

PEAK_TOLERANCE = 0.02
"""Of the memory formula, relative to the peak."""


def communication_differences(simulated: SimulatedRank) -> list[str]:
    """Each kind of collective over each group of which the formula has another number or other bytes, one line each."""
    formula_lines = communication(simulated.job.traffic(simulated.stage))
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


def peak_differences(simulated: SimulatedRank, formula_bytes: int) -> list[str]:
    """One line if the memory formula's peak is off by more than `PEAK_TOLERANCE`."""
    error = formula_bytes / simulated.peak_bytes - 1
    if abs(error) <= PEAK_TOLERANCE:
        return []
    return [
        f"{_where(simulated)}: memory: counted a peak of {simulated.peak_bytes:,} bytes, by formula "
        f"{formula_bytes:,}, {error:+.1%}; at most {PEAK_TOLERANCE:.0%} is allowed"
    ]


def _where(simulated: SimulatedRank) -> str:
    return f"stage {simulated.stage} (rank {simulated.rank} of {simulated.job.world_size})"


def _shown(sums: dict[tuple[str, str], Total], group: str, kind: str) -> str:
    calls, message_bytes = sums.get((group, kind), Total(0, 0))
    return f"{calls:,} calls of {message_bytes:,} bytes"
