"""Compares a layout's run with the run of a single process: does the order of sums explain all differences?"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from megatron_fanformer.parity.recording import TOKEN_LOSS, TensorPart, index_of
from megatron_fanformer.parity.trial import Trace

FACTOR = 8.0
"""A difference may be this many times the largest difference of reordered runs, the noise. Measured in float32:
layouts without a bug stay below twice the noise, planted bugs first show at 157 times the noise or more."""
FLOAT32_EPSILON = float(np.finfo(np.float32).eps)
SMALLEST_SCALE = 1e-6  # times the largest norm of a kind: tensors with smaller norms consist of rounding errors

KINDS = ("outputs", "gradients", "weights")
Errors = dict[str, float]  # by the name of a tensor


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The run of a single process: whole tensors, in forward order, and the scales by which differences are divided."""

    losses: list[float]
    tensors: dict[str, dict[str, np.ndarray]]
    """By kind, then by name."""
    scales: dict[str, Errors]
    """By kind, then by name: the tensor's norm; for a weight, the larger norm of the change and the rounding."""
    last_places: Errors
    """By the name of a weight: what another rounding of one element or of its optimizer state changes; relative."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The relative differences of a run from the baseline."""

    losses: list[float]
    tensors: dict[str, Errors]
    """By kind, then by name in forward order: the norm of the difference, divided by the scale."""


@dataclass(frozen=True)
class Finding:
    """A loss or a tensor that differs by more than the order of sums explains."""

    kind: str
    name: str
    difference: float
    bound: float

    def __str__(self) -> str:
        subject = f"{self.kind} {self.name}" if self.kind == "loss of step" else f"{self.kind} of {self.name}"
        return f"{subject} ({self.difference:.1e}, bound {self.bound:.1e})"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest differences that the order of sums explains; 0 for a tensor that the single process lacks."""

    losses: list[float]
    tensors: dict[str, Errors] = field(default_factory=dict)

    def findings(self, differences: Differences) -> Iterator[Finding]:
        """Yield the differences beyond their bounds, in the order in which a run computes what differs."""
        first_loss, *later_losses = [
            Finding("loss of step", str(step), difference, bound)
            for step, (difference, bound) in enumerate(zip(differences.losses, self.losses, strict=True), 1)
        ]
        outputs, gradients, weights = (
            [
                Finding(kind.removesuffix("s"), name, difference, self.tensors[kind].get(name, 0.0))
                for name, difference in differences.tensors[kind].items()
            ]
            for kind in KINDS
        )
        for finding in (*outputs, first_loss, *gradients, *later_losses, *weights):
            if not finding.difference <= finding.bound:  # true for NaN, too
                yield finding


def baseline_of(trace: Trace, epsilon: float = FLOAT32_EPSILON, state_epsilon: float = FLOAT32_EPSILON) -> Baseline:
    """Return the baseline of a single process's trace; the machine epsilons are of the weights and optimizer states."""
    tensors = {kind: _assemble(getattr(trace, kind)) for kind in KINDS}
    initial = _assemble(trace.initial)
    changes = {name: weight - initial[name] for name, weight in tensors["weights"].items()}
    scales: dict[str, Errors] = {}
    for kind, tensors_by_name in {**tensors, "weights": changes}.items():  # a weight is scaled by its change
        norms = {name: _norm(tensor) for name, tensor in tensors_by_name.items()}
        smallest = SMALLEST_SCALE * max(norms.values())
        scales[kind] = {name: max(norm, smallest) for name, norm in norms.items()}
    places = {}
    for name, weight in tensors["weights"].items():  # a change below the weight's rounding is noise, and no scale
        scale = scales["weights"][name] = max(scales["weights"][name], epsilon * _norm(weight))
        places[name] = float(max(epsilon * np.abs(weight).max(), state_epsilon * np.abs(changes[name]).max())) / scale
    return Baseline(losses=trace.losses, tensors=tensors, scales=scales, last_places=places)


def differences(baseline: Baseline, traces: list[Trace]) -> Differences:
    """Return the differences of a run, which has a trace for each rank, from the baseline: the largest of all ranks."""
    losses = [
        max(abs(trace.losses[step] - loss) for trace in traces) / abs(loss) for step, loss in enumerate(baseline.losses)
    ]
    tensors = {
        kind: _errors(baseline.tensors[kind], baseline.scales[kind], [getattr(trace, kind) for trace in traces])
        for kind in KINDS
    }
    return Differences(losses=losses, tensors=tensors)


def bounds_from(noise: list[Differences], last_places: Errors) -> Bounds:
    """Return bounds: `FACTOR` times the largest differences in `noise`, which come from rounding alone.

    With few runs, some tensor shows hardly any noise by chance. Therefore the noise of a tensor counts as at least the
    noise of the median tensor of the same kind, and that of a weight as at least its `last_places`. The noise of a
    step's loss counts as at least the noise of earlier losses, and of the tokens' losses, its summands.
    """
    loss_noise = [max(max(run.losses[:steps]) for run in noise) for steps in range(1, len(noise[0].losses) + 1)]
    tensors = {}
    for kind in KINDS:
        worst = {name: max(run.tensors[kind][name] for run in noise) for name in noise[0].tensors[kind]}
        floor = max(median(worst.values()), FLOAT32_EPSILON)
        places = last_places if kind == "weights" else {}
        tensors[kind] = {name: FACTOR * max(value, floor, places.get(name, 0.0)) for name, value in worst.items()}
    token_noise = max(run.tensors["outputs"][TOKEN_LOSS] for run in noise)
    return Bounds(losses=[FACTOR * max(value, token_noise, FLOAT32_EPSILON) for value in loss_noise], tensors=tensors)


def _assemble(parts: list[TensorPart]) -> dict[str, np.ndarray]:
    """Return whole tensors, by name, joined from their parts."""
    whole: dict[str, np.ndarray] = {}
    for part in parts:
        tensor = whole.setdefault(part.name, np.full(part.shape, np.nan, dtype=np.float32))
        tensor[index_of(part)] = part.values
    incomplete = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not incomplete, f"tensors of the single process are incomplete or not finite: {', '.join(incomplete)}"
    return whole


def _errors(whole: dict[str, np.ndarray], scales: Errors, ranks: list[list[TensorPart]]) -> Errors:
    """Return the relative norm of the ranks' differences from each whole tensor; infinite if a part is missing."""
    missing = -1.0  # marks elements that no rank has; differences are not negative
    errors = {name: np.full(tensor.shape, missing, dtype=np.float32) for name, tensor in whole.items()}
    for part in (part for parts in ranks for part in parts):
        if part.name not in whole or part.shape != whole[part.name].shape:
            errors[part.name] = np.full(part.shape, np.inf, dtype=np.float32)  # the single process has no such tensor
            continue
        index = index_of(part)
        error = np.nan_to_num(np.abs(part.values - whole[part.name][index]), nan=np.inf)
        errors[part.name][index] = np.maximum(errors[part.name][index], error)
    return {
        name: float("inf") if (error == missing).any() else _norm(error) / scales.get(name, 1.0)
        for name, error in errors.items()
    }


def _norm(tensor: np.ndarray) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))
