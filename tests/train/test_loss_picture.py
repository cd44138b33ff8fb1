"""The smoothed loss of a picture: the mean around each step, without a lag where the loss falls."""

import math
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.train.loss_picture import loss_picture, smoothed, smoothing_window


def test_a_smoothed_value_is_the_mean_of_those_around_it() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    means = [sum(values[place - 2 : place + 3]) / 5 for place in range(2, 5)]
    assert smoothed(values, 5)[2:5] == pytest.approx(means, rel=1e-12)


def test_at_the_ends_it_is_on_the_line_through_the_nearest_ones() -> None:
    values = [9.0, 7.5, 6.9, 6.0, 6.2, 5.1]
    for place, around in ((0, range(5)), (1, range(5)), (4, range(1, 6)), (5, range(1, 6))):
        line = np.polyfit(around, [values[each] for each in around], 1)
        assert smoothed(values, 5)[place] == pytest.approx(np.polyval(line, place), rel=1e-12)


def test_a_loss_that_falls_steadily_is_its_own_smoothed_loss() -> None:
    falls = [9.5 - 0.01 * step for step in range(400)]
    assert smoothed(falls, smoothing_window(400)) == pytest.approx(falls, rel=1e-9)


@pytest.mark.parametrize(("steps", "window"), [(1, 1), (39, 1), (40, 3), (330, 17)])
def test_the_window_is_a_twentieth_of_the_steps_and_has_a_middle(steps: int, window: int) -> None:
    assert smoothing_window(steps) == window
    assert len(smoothed([1.0] * steps, window)) == steps


def test_losses_that_are_no_numbers_are_left_out() -> None:
    metrics: list[dict[str, Any]] = [
        {"step": step, "loss": 5 - step / 60, "validation_loss/web": 3.0} for step in range(60)
    ]
    without = [*metrics[:20], *metrics[24:]]
    for entry, odd in zip(metrics[20:24], (math.nan, math.inf, None, "abc"), strict=True):
        entry |= {"loss": odd, "validation_loss/web": odd}
    assert loss_picture(metrics, title="a run") == loss_picture(without, title="a run")


def test_a_run_with_a_skipped_step_is_drawn() -> None:
    metrics = [{"step": 1, "loss": 2.0}, {"step": 2, "skipped": "nan"}, {"step": 3, "loss": 1.0}]
    picture = loss_picture([*metrics, {"step": 4, "loss": 1.0, "validation_loss/web": 1.5}], title="a run", entropy=3)
    assert picture.startswith(b"\x89PNG")
