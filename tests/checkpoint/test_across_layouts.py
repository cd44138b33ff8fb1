"""A checkpoint of any layout and optimizer loads in any other: weights and optimizer state bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoint.states import LAYOUTS, Shown, load_and_train, small_model, train_and_save, world_size
from tests.training.layouts import gather

SAME_LOSS = 1e-6  # relative, between layouts, in float32: sums are taken in another order
SAME_LOSS_BF16 = 2e-3  # activations round at other places in other layouts
DTYPES = {"fp32": (torch.float32, SAME_LOSS), "bf16": (torch.bfloat16, SAME_LOSS_BF16)}

CHEAP = [name for name in LAYOUTS if world_size(name) <= 2]
RING = list(zip(CHEAP, [*CHEAP[1:], CHEAP[0]], strict=True))  # each is saved once and loaded once
OTHER_PAIRS = [(saved, loaded) for saved in LAYOUTS for loaded in LAYOUTS if (saved, loaded) not in RING]
BF16_PAIRS = [("tp2", "tp1-plain"), ("tp2-sp-plain", "dp2"), ("dp2-plain", "vpp2"), ("pp2", "tp2-sp-plain")]

RunOnRanks = Callable[..., list[Any]]


class Saved(NamedTuple):
    checkpoint: Path
    ranks: list[Shown]


@pytest.fixture(scope="module")
def saved_in(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """The checkpoint of a layout, made when first asked for."""
    made: dict[Any, Saved] = {}

    def saved(layout: str, dtype: str, *, untied: bool = False) -> Saved:
        key = (layout, dtype, untied)
        if key not in made:
            run = tmp_path_factory.mktemp(layout)
            arguments = (layout, small_model(untied=untied), DTYPES[dtype][0], run)
            ranks = run_on_ranks(world_size(layout), train_and_save, *arguments)
            made[key] = Saved(run / "checkpoints" / "step-00000002", ranks)
        return made[key]

    return saved


def check(run_on_ranks: RunOnRanks, saved: Saved, loaded_in: str, dtype: str, *, untied: bool = False) -> None:
    kind, same_loss = DTYPES[dtype]
    ranks = run_on_ranks(
        world_size(loaded_in), load_and_train, loaded_in, small_model(untied=untied), kind, saved.checkpoint
    )
    before, after = (gather([rank.pieces for rank in each]) for each in (saved.ranks, ranks))
    assert before.keys() == after.keys()
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in before) > 10
    assert any(name.startswith("optimizer.state.param.") for name in before) is (dtype == "bf16")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    groups = {group["wd_mult"]: group for rank in saved.ranks for group in rank.groups}
    assert {group["step"] for group in groups.values()} == {2}
    assert [group for rank in ranks for group in rank.groups if group != groups[group["wd_mult"]]] == []
    assert ranks[0].next_losses == pytest.approx(saved.ranks[0].next_losses, rel=same_loss, abs=0)


@pytest.mark.parametrize(("saved", "loaded"), RING)
def test_the_state_is_the_same_in_the_next_layout(
    run_on_ranks: RunOnRanks, saved_in: Callable[..., Saved], saved: str, loaded: str
) -> None:
    check(run_on_ranks, saved_in(saved, "fp32"), loaded, "fp32")


@pytest.mark.full
@pytest.mark.parametrize(("saved", "loaded"), OTHER_PAIRS)
def test_the_state_is_the_same_in_every_layout(
    run_on_ranks: RunOnRanks, saved_in: Callable[..., Saved], saved: str, loaded: str
) -> None:
    check(run_on_ranks, saved_in(saved, "fp32"), loaded, "fp32")


@pytest.mark.parametrize(("saved", "loaded"), BF16_PAIRS)
def test_main_weights_in_float32_are_the_same_too(
    run_on_ranks: RunOnRanks, saved_in: Callable[..., Saved], saved: str, loaded: str
) -> None:
    check(run_on_ranks, saved_in(saved, "bf16"), loaded, "bf16")


@pytest.mark.parametrize(("saved", "loaded"), [("pp2", "tp1-plain"), ("tp1-plain", "pp2")])
def test_an_output_layer_of_its_own_is_the_same_too(
    run_on_ranks: RunOnRanks, saved_in: Callable[..., Saved], saved: str, loaded: str
) -> None:
    check(run_on_ranks, saved_in(saved, "fp32", untied=True), loaded, "fp32", untied=True)
