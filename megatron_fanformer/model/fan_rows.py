"""Which rows of a FAN map one tensor parallel rank owns, and where they and what they make belong in the whole.

Shapes: P periodic and G linear rows of an output, T tensor parallel ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple


class FANOutput(NamedTuple):
    """The rows of one output of a FAN map."""

    periodic: int
    linear: int

    @classmethod
    def of_width(cls, width: int, p_ratio: float) -> "FANOutput":
        """Return the rows that make an output of that width."""
        periodic = int(p_ratio * width)
        return cls(periodic, width - 2 * periodic)

    @property
    def rows(self) -> int:
        """Rows of the map."""
        return self.periodic + self.linear

    @property
    def width(self) -> int:
        """Width of what the map makes: [cos p, sin p, g]."""
        return 2 * self.periodic + self.linear


class RowRange(NamedTuple):
    """A run of one rank's rows, and where it belongs in the canonical [p | g] map of its output.

    Or a run of what they make, and where that belongs in the canonical [cos p, sin p, g].
    """

    output: int
    start: int
    end: int
    canonical_start: int


class FANShard(NamedTuple):
    """The rows of the FAN map that one of `ranks` owns: those of each output, one output after the other."""

    ranks: int
    rank: int
    outputs: tuple[FANOutput, ...]
    """A rank's part of each output: P/T and G/T."""

    @classmethod
    def of_rank(cls, rank: int, ranks: int, whole: Sequence[FANOutput]) -> "FANShard":
        """Return a rank's part of whole outputs.

        Raises:
            ValueError: their rows do not divide over the ranks.
        """
        for periodic, linear in whole:
            if periodic % ranks or linear % ranks:
                raise ValueError(
                    f"the FAN map's {periodic} periodic and {linear} linear rows do not divide over tensor parallel "
                    f"size {ranks}; choose a p_ratio for which both do"
                )
        return cls(ranks, rank, tuple(FANOutput(*(rows // ranks for rows in output)) for output in whole))

    @property
    def rows(self) -> list[int]:
        """Rows of each output in turn, as they lie in a rank's pre-activation."""
        return [output.rows for output in self.outputs]

    def whole(self, output: int) -> FANOutput:
        """The rows of an output on all ranks."""
        return FANOutput(*(self.ranks * rows for rows in self.outputs[output]))

    def row_ranges(self) -> list[RowRange]:
        """Return where this rank's rows belong in the canonical maps."""
        ranges, start = [], 0
        for number, (periodic, linear) in enumerate(self.outputs):
            linear_start = self.ranks * periodic + self.rank * linear
            middle, end = start + periodic, start + periodic + linear
            ranges.append(RowRange(number, start, middle, self.rank * periodic))
            ranges.append(RowRange(number, middle, end, linear_start))
            start = end
        return [range_ for range_ in ranges if range_.end > range_.start]

    def feature_ranges(self) -> list[RowRange]:
        """Return where what this rank's rows make by themselves belongs in the canonical outputs [cos p, sin p, g]."""
        ranges, start = [], 0
        for number, (periodic, linear) in enumerate(self.outputs):
            whole = self.ranks * periodic
            first, last = self.rank * periodic, 2 * whole + self.rank * linear
            for size, canonical_start in ((periodic, first), (periodic, whole + first), (linear, last)):
                ranges.append(RowRange(number, start, start + size, canonical_start))
                start += size
        return [range_ for range_ in ranges if range_.end > range_.start]
