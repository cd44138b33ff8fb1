"""When an effect counts as shown."""

import pytest

from megatron_fanformer.experiments.probes.outcome import above, below


@pytest.mark.parametrize(
    ("interval", "is_below", "is_above"),
    [((-2.0, -1.0), True, False), ((-2.0, 1.0), False, False), ((1.0, 2.0), False, True), (None, None, None)],
)
def test_an_effect_is_shown_by_its_whole_interval(
    interval: tuple[float, float] | None, is_below: bool | None, is_above: bool | None
) -> None:
    assert (below(interval, 0.0), above(interval, 0.0)) == (is_below, is_above)
