"""Comparison of a layout's run with the single process's: whether the order of sums explains the difference."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from megatron_fanformer.parity.recording import TOKEN_LOSS, TensorPart, part_of
from megatron_fanformer.parity.trial import Trace

FACTOR = 8.0
"""A difference may be this many times what reordered runs showed. Measured in float32: layouts without a bug stay below
twice the noise, planted bugs first show at 157 times it or more."""
FLOAT32_EPSILON = float(np.finfo(np.float32).eps)
SMALLEST_SCALE = 1e-6  # of the largest tensor's: below it a tensor's own size is rounding itself

KINDS = ("outputs", "gradients", "weights")
Errors = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The single process's run: whole tensors by name, in forward order, and the scales of differences."""

    losses: list[float]
    tensors: dict[str, dict[str, np.ndarray]]
    """By kind, then by name."""
    scales: dict[str, Errors]
    """The norm of each tensor; for a weight, the distance that it moved, or could at least have moved."""
    last_places: Errors
    """For each weight, a unit in the last place of its largest element, relative to its scale."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A run's differences from the baseline, relative to it."""

    losses: list[float]
    tensors: dict[str, Errors]
    """Norm of the difference over the scale, by kind, then by name in forward order."""


@dataclass(frozen=True)
class Finding:
    """A quantity that differs by more than the order of sums explains."""

    kind: str
    name: str
    difference: float
    bound: float

    def __str__(self) -> str:
        of = "" if self.kind == "loss of step" else "of "
        return f"{self.kind} {of}{self.name} ({self.difference:.1e}, bound {self.bound:.1e})"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Largest differences that the order of sums explains: `FACTOR` times those of reordered runs."""

    losses: list[float]
    tensors: dict[str, Errors] = field(default_factory=dict)

    def findings(self, differences: Differences) -> Iterator[Finding]:
        """Yield differences beyond their bounds: outputs, the first loss, gradients, later losses, weights."""
        first, *later = [
            Finding("loss of step", str(step), *pair)
            for step, pair in enumerate(zip(differences.losses, self.losses, strict=True), 1)
        ]
        outputs, gradients, weights = (
            [
                Finding(kind.removesuffix("s"), name, difference, self.tensors[kind].get(name, 0.0))
                for name, difference in differences.tensors[kind].items()
            ]
            for kind in KINDS
        )
        for finding in (*outputs, first, *gradients, *later, *weights):
            if not finding.difference <= finding.bound:  # so that NaN is one
                yield finding


def baseline_of(trace: Trace, epsilon: float = FLOAT32_EPSILON) -> Baseline:
    """Return all that one process recorded as a baseline; `epsilon` is that of the type in which weights are held."""
    tensors = {kind: _assembled(getattr(trace, kind)) for kind in KINDS}
    initial = _assembled(trace.initial)
    moved = {name: weight - initial[name] for name, weight in tensors["weights"].items()}
    scales = {kind: _scales(moved if kind == "weights" else tensors[kind]) for kind in KINDS}
    for name, weight in tensors["weights"].items():  # a move below its rounding is none
        scales["weights"][name] = max(scales["weights"][name], epsilon * _norm(weight))
    places = {
        name: epsilon * float(np.abs(weight).max()) / scales["weights"][name]
        for name, weight in tensors["weights"].items()
    }
    return Baseline(losses=trace.losses, tensors=tensors, scales=scales, last_places=places)


def differences(baseline: Baseline, traces: list[Trace]) -> Differences:
    """Return how far a run on these ranks is from the baseline; where ranks hold the same part, the furthest counts."""
    losses = [
        max(abs(trace.losses[step] - loss) for trace in traces) / abs(loss) for step, loss in enumerate(baseline.losses)
    ]
    tensors = {
        kind: _errors(baseline.tensors[kind], baseline.scales[kind], [getattr(trace, kind) for trace in traces])
        for kind in KINDS
    }
    return Differences(losses=losses, tensors=tensors)


def bounds_from(noise: list[Differences], last_places: Errors) -> Bounds:
    """Return the bounds that reordered runs give.

    A tensor's is taken from its own noise or the median tensor's, whichever is larger: with few runs some tensor is
    always lucky. A weight's is taken from a unit in its last place where that is more: updates that are a millionth
    apart mostly round to the same weight, and so seldom to the next one that few runs do not show it in every tensor.
    A loss's is the largest so far, or that of the token losses that it is the mean of, which cannot be lucky.
    """
    steps = range(len(noise[0].losses))
    so_far = [max(run.losses[earlier] for run in noise for earlier in range(step + 1)) for step in steps]
    tensors = {}
    for kind in KINDS:
        worst = {name: max(run.tensors[kind][name] for run in noise) for name in noise[0].tensors[kind]}
        floor = max(median(worst.values()), FLOAT32_EPSILON)
        places = last_places if kind == "weights" else {}
        tensors[kind] = {name: FACTOR * max(value, floor, places.get(name, 0.0)) for name, value in worst.items()}
    of_tokens = max(run.tensors["outputs"][TOKEN_LOSS] for run in noise)
    return Bounds(losses=[FACTOR * max(value, of_tokens, FLOAT32_EPSILON) for value in so_far], tensors=tensors)


def _assembled(parts: list[TensorPart]) -> dict[str, np.ndarray]:
    whole: dict[str, np.ndarray] = {}
    for part in parts:
        tensor = whole.setdefault(part.name, np.full(part.shape, np.nan, dtype=np.float32))
        tensor[part_of(tensor, part.where)] = part.values
    incomplete = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not incomplete, f"the single process's {', '.join(incomplete)} are incomplete or not finite"
    return whole


def _scales(tensors: Mapping[str, np.ndarray]) -> Errors:
    norms = {name: _norm(tensor) for name, tensor in tensors.items()}
    smallest = SMALLEST_SCALE * max(norms.values())
    return {name: max(norm, smallest) for name, norm in norms.items()}


def _errors(whole: dict[str, np.ndarray], scales: Errors, ranks: list[list[TensorPart]]) -> Errors:
    """Return the norm of the difference over the scale; infinite where a part is missing or not finite."""
    unseen = -1.0
    furthest = {name: np.full(tensor.shape, unseen, dtype=np.float32) for name, tensor in whole.items()}
    for part in (part for parts in ranks for part in parts):
        if part.name not in whole or part.shape != whole[part.name].shape:
            furthest[part.name] = np.full(part.shape, np.inf, dtype=np.float32)
            continue
        where = part_of(whole[part.name], part.where)
        apart = np.nan_to_num(np.abs(part.values - whole[part.name][where]), nan=np.inf)
        furthest[part.name][where] = np.maximum(furthest[part.name][where], apart)
    return {
        name: float("inf") if (apart == unseen).any() else _norm(apart) / scales.get(name, 1.0)
        for name, apart in furthest.items()
    }


def _norm(tensor: np.ndarray) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))
