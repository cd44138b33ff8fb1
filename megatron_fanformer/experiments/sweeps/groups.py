"""A sweep's cells by point: those that differ in seed alone, together."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_fanformer.experiments.sweeps.cells import Outcome
from megatron_fanformer.experiments.sweeps.file import Cell, Sweep


class Group(NamedTuple):
    """The cells that differ in seed alone."""

    points: dict[str, str]
    """Of each axis."""
    cell: Cell
    """One of them, for what they share."""
    losses: dict[int, float]
    """By seed; of those that have one."""


def groups_of(found: Sequence[Outcome]) -> list[Group]:
    """All points, in the order of the cells."""
    groups: dict[tuple[str, ...], Group] = {}
    for each in found:
        key = tuple(each.cell.points.values())
        group = groups.setdefault(key, Group(each.cell.points, each.cell, {}))
        if each.loss is not None:
            group.losses[each.cell.seed] = each.loss
    return list(groups.values())


def size_of(sweep: Sweep, cell: Cell) -> float:
    """Where a cell stands on the axis that the losses are drawn over."""
    match sweep.config.report.over:
        case "parameters":
            return float(parameters_of(cell))
        case "tokens":
            return float(cell.tokens)
        case None:
            return 0.0
        case name:
            return float(cell.field(name))


def parameters_of(cell: Cell) -> int:
    """A cell's parameters outside the embedding and the head, as the paper counts its Transformers' (268M at 300M)."""
    model = cell.config.model
    return model.num_parameters - model.padded_vocab_size * model.hidden_size * (
        1 + model.untie_embeddings_and_output_weights
    )
