"""The learning rate at chosen steps, against the formulas."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fanformer.train.optimizers import OptimizerConfig
from megatron_fanformer.train.schedule import ScheduleConfig, build_scheduler

PEAK = 4e-4
RECIPE = OptimizerConfig(lr=PEAK)
WARMUP, STEPS = 20, 100
EXACT = 1e-12  # relative: the formulas in double precision


def rates(train_iters: int = STEPS, **settings: Any) -> list[float]:
    """The rate of each step, from the first."""
    config = ScheduleConfig(lr_warmup_iters=WARMUP, **settings)
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.1, "params": []}])
    scheduler = build_scheduler(config, optimizer, RECIPE, train_iters=train_iters)
    found = []
    for _ in range(train_iters):
        scheduler.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_group_has_a_rate_of_its_own() -> None:
    groups = [{"lr": 0.0, "weight_decay": 0.1, "params": [], "lr_mult": share} for share in (1.0, 0.5)]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    scheduler = build_scheduler(ScheduleConfig(), optimizer, RECIPE, train_iters=STEPS)
    for step in range(STEPS):
        scheduler.step(1)
        assert 0 < groups[1]["lr"] == groups[0]["lr"] / 2, step


def progress(step: int, start: int = WARMUP, end: int = STEPS) -> float:
    return (step - start) / (end - start)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant", "WSD"])
def test_the_warm_up_is_linear_from_the_first_step(style: str) -> None:
    assert rates(lr_decay_style=style)[:WARMUP] == pytest.approx(
        [PEAK * step / WARMUP for step in range(1, WARMUP + 1)], rel=EXACT
    )


@pytest.mark.parametrize("step", [21, 40, 60, 99, 100])
def test_cosine_falls_to_a_tenth_of_the_peak(step: int) -> None:
    low = PEAK / 10
    expected = low + (PEAK - low) * 0.5 * (1 + math.cos(math.pi * progress(step)))
    assert rates()[step - 1] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(
    ("form", "share"),
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: 0.5 * (1 + math.cos(math.pi * done))),
        ("exponential", lambda done: 2 * 0.5**done - 1),
        ("minus_sqrt", lambda done: 1 - math.sqrt(done)),
    ],
)
def test_wsd_holds_the_peak_and_then_decays(form: str, share: Any) -> None:
    found = rates(lr_decay_style="WSD", lr_wsd_decay_iters=30, lr_wsd_decay_style=form, min_lr=0.0)
    assert found[WARMUP - 1 : 70] == [PEAK] * 51
    expected = [PEAK * share(progress(step, start=70)) for step in range(71, 101)]
    assert found[70:] == pytest.approx(expected, rel=EXACT, abs=1e-18)


def test_wsds_default_is_a_tenth_of_the_decays_end() -> None:
    found = rates(lr_decay_style="WSD", lr_decay_iters=60, min_lr=0.0)
    assert found[53] == PEAK > found[54]
    assert found[54:60] == pytest.approx([PEAK * (1 - math.sqrt(step / 6)) for step in range(1, 7)], abs=1e-18)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (dict(lr_wsd_decay_iters=80), None),  # begins where the warm-up ends
        (dict(lr_wsd_decay_iters=81), "is 81, and with a warm-up of 20 does not fit into the 100 steps to the decay's"),
        (dict(lr_wsd_decay_iters=41, lr_decay_iters=60), "is 41, and with a warm-up of 20 does not fit into the 60 st"),
        (dict(lr_warmup_iters=91), "is null, here 10, and with a warm-up of 91 does not fit"),
        (dict(lr_wsd_decay_iters=81, lr_decay_style="cosine"), None),
    ],
)
def test_a_decay_that_begins_in_the_warm_up_is_refused(settings: dict[str, Any], problem: str | None) -> None:
    """The rate would rise to the peak, and go on from far below it."""
    config = ScheduleConfig(**{"lr_decay_style": "WSD", "lr_warmup_iters": WARMUP, **settings})
    found = config.joint_problems(lr=PEAK, train_iters=STEPS)
    assert [line.startswith(f"schedule.lr_wsd_decay_iters {problem}") for line in found] == [True] * bool(problem)
    assert config.joint_problems(lr=PEAK, train_iters=None) == [] or config.lr_decay_iters
