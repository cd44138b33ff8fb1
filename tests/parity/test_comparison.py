"""What counts as rounding and what does not, on numbers made for it."""

import math

import numpy as np

from megatron_fanformer.parity.comparison import baseline_of, bounds_from, differences
from megatron_fanformer.parity.recording import TOKEN_LOSS, TensorPart
from megatron_fanformer.parity.trial import Trace

SIZE = 64
BEFORE = np.random.default_rng(0).normal(1, 0.1, SIZE).astype(np.float32)
STEP = np.float32(1e-3)


def trace_of(weight: np.ndarray) -> Trace:
    """A run that ended with this weight of a norm."""

    def parts(name: str, values: np.ndarray) -> list[TensorPart]:
        return [TensorPart(name, values.shape, (slice(0, SIZE),), values.astype(np.float32))]

    return Trace(
        losses=[4.0],
        outputs=parts(TOKEN_LOSS, np.full(SIZE, 4.0)),
        gradients=parts("norm", np.ones(SIZE)),
        initial=parts("norm", BEFORE),
        weights=parts("norm", weight),
    )


def test_a_weight_in_the_next_last_place_is_rounding_and_a_missed_step_is_not() -> None:
    """Where reordered runs happened to round every weight alike."""
    after = BEFORE + STEP
    baseline = baseline_of(trace_of(after))
    noise = [differences(baseline, [trace_of(after)])] * 3
    bounds = bounds_from(noise, baseline.last_places)

    def found_with(element: np.float32) -> list[str]:
        weight = np.append(after[:-1], element)
        return [finding.name for finding in bounds.findings(differences(baseline, [trace_of(weight)]))]

    extra = differences(baseline, [trace_of(after)])
    extra.tensors["gradients"]["of another layer"] = math.inf
    assert [finding.name for finding in bounds.findings(extra)] == ["of another layer"]
    assert found_with(np.nextafter(after[-1], np.float32(2))) == []
    assert found_with(BEFORE[-1]) == ["norm"]
    assert found_with(after[-1] + STEP / 100) == ["norm"]  # a hundredth of a step of one element in 64
    bounds = bounds_from(noise, baseline_of(trace_of(after), state_epsilon=2**-7).last_places)
    assert found_with(after[-1] + STEP * 2**-7) == []  # as the next moment in bf16 gives it
    assert found_with(after[-1] + STEP / 10) == ["norm"]
