"""What a run costs beyond its steps: sizes against a checkpoint that the trainer wrote, times against failures drawn at
random."""

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.planning.machines import load_machine
from megatron_fanformer.sizing.estimate import SECONDS_PER_HOUR, Estimate, estimate, for_machine, job_of
from megatron_fanformer.sizing.goodput import Failures, checkpoint_bytes, goodput, storage
from megatron_fanformer.training.config import config_from_dict
from tests.sizing.test_candidates import run_config
from tests.small_runs import small_run, train, write_tokens

RunOnRanks = Callable[..., list[Any]]
GPUS = 8


def planned(*, seconds: float = 1.0, **checkpoint: Any) -> Estimate:
    """A small run whose steps take so long."""
    machine = load_machine("h100")
    config = for_machine(run_config(checkpoint=checkpoint, training={"global_batch_size": 16}), machine, on_cpu=False)
    found = estimate("", config, job_of(config, GPUS), machine)
    return dataclasses.replace(found, time=dataclasses.replace(found.time, seconds=seconds))


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": {"dtype": "bf16"}},
        pytest.param({"optimizer": {"exp_avg_sq_dtype": "bf16"}}, marks=pytest.mark.full),
        pytest.param({"optimizer": {"name": "muon"}}, marks=pytest.mark.full),
        pytest.param({"model": {"untie_embeddings_and_output_weights": True}}, marks=pytest.mark.full),
    ],
    ids=["bf16", "a moment in bf16", "muon", "untied"],
)
def test_a_checkpoint_that_the_trainer_wrote(
    sections: dict[str, Any], run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    """Its tensors to the byte, and files that are not much larger."""
    from megatron_fanformer.checkpoint.stored_files import read_checked
    from megatron_fanformer.checkpoint.tensor_table import tensors_of

    tokens = write_tokens(tmp_path / "tokens")
    values = small_run(tokens, tmp_path / "run", **sections)
    values["training"]["train_iters"], values["schedule"]["lr_warmup_iters"] = 1, 0
    run_on_ranks(1, train, values)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    tensors = tensors_of(read_checked(folder)).values()
    predicted = checkpoint_bytes(config_from_dict(values).job(1, layers="local", on_cpu=True))
    assert predicted == sum(math.prod(each.size) * each.properties.dtype.itemsize for each in tensors)
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    assert predicted < on_disk < predicted + 400_000


@pytest.mark.parametrize(
    ("checkpoint", "steps", "saves", "kept", "stored"),
    [
        ({"save_interval": 10, "keep": 2}, 45, 5, 2, 3),  # the last step is saved, too
        ({"save_interval": 10}, 40, 4, 4, 4),
        ({"save_interval": 10, "keep": 9}, 40, 4, 4, 4),
        ({}, 40, 1, 1, 1),
    ],
)
def test_the_disk_holds_what_is_kept_and_what_is_being_written(
    checkpoint: dict[str, Any], steps: int, saves: int, kept: int, stored: int
) -> None:
    held = storage(planned(**checkpoint), steps)
    assert (held.saves, held.kept, held.disk_bytes) == (saves, kept, stored * held.checkpoint_bytes)


def drawn(work: float, restart: float, between: float, saves: int) -> tuple[float, float, float]:
    """Seconds of a run in all, of restarts and of undone work, with failures drawn at random."""
    generator = random.Random(7)
    total = restarting = undone = 0.0
    for _ in range(saves):
        while (failed := generator.expovariate(1 / between)) < work:
            total, undone = total + failed, undone + failed
            while (failed := generator.expovariate(1 / between)) < restart:
                total, restarting = total + failed, restarting + failed
            total, restarting = total + restart, restarting + restart
        total += work
    return total, restarting, undone


def test_failures_cost_what_drawn_ones_cost() -> None:
    """A run that saves every 100 s for 20, fails every 300 s, and takes 60 s and a loading to go on."""
    run = planned(save_interval=100)
    rate = checkpoint_bytes(run.job) / 20
    failures = Failures(gpu_hours=300 * GPUS / SECONDS_PER_HOUR, restart_minutes=1.0)
    saves = 20_000
    spent = goodput(run, saves * 100, rate, failures)
    total, restarting, undone = drawn(120, 80, 300, saves)
    assert spent.total_seconds == pytest.approx(total, rel=0.02)
    assert spent.restarts_seconds == pytest.approx(restarting, rel=0.03)
    assert spent.lost_seconds == pytest.approx(undone, rel=0.03)
    assert spent.failures == pytest.approx(total / 300, rel=0.02)
    assert (spent.steps_seconds, spent.saves_seconds) == (100 * saves, pytest.approx(20 * saves))
    assert spent.share == spent.steps_seconds / spent.total_seconds


def test_the_best_interval_costs_least() -> None:
    failures = Failures(gpu_hours=2.0 * GPUS, restart_minutes=5)
    rate = checkpoint_bytes(planned().job) / 20

    def total(interval: int) -> float:
        return goodput(planned(save_interval=interval), 100_000, rate, failures).total_seconds

    best = goodput(planned(save_interval=1000), 100_000, rate, failures).best_interval_steps
    assert best == math.ceil(math.sqrt(2 * 20 * 7200) - 20)
    assert total(best) < min(total(best // 2), total(2 * best))


def test_saves_in_the_background_make_training_wait_only_for_the_next() -> None:
    rarely = Failures(gpu_hours=1e9, restart_minutes=1)
    run = planned(save_interval=100, async_save=True)
    rate = checkpoint_bytes(run.job) / 30
    assert goodput(run, 1000, rate, rarely).share == pytest.approx(1, abs=1e-4)
    slow = goodput(run, 1000, rate / 5, rarely)  # 150 s, of which the next save waits for 50
    assert slow.saves_seconds == 10 * 50
    often = Failures(gpu_hours=GPUS, restart_minutes=1)
    in_turn = dataclasses.replace(run, config=dataclasses.replace(run.config, checkpoint=planned().config.checkpoint))
    assert goodput(run, 1000, rate, often).lost_seconds > 0 < goodput(in_turn, 1000, rate, often).lost_seconds


@pytest.mark.parametrize(
    ("seconds", "interval", "failures", "message"),
    [
        (
            1.0,
            None,
            Failures(gpu_hours=0.08, restart_minutes=0.5),
            "saves are 27.8 hours apart, and the run fails every 36 seconds: it would never end; lower "
            "checkpoint.save_interval, or raise",
        ),
        # Two factors, each of them a number, whose product is none.
        (
            1.0,
            300,
            Failures(gpu_hours=8 * GPUS / SECONDS_PER_HOUR, restart_minutes=90),
            "saves are 300 seconds apart, and the run fails every 8 seconds: it would never end; lower "
            "--restart-minutes, which is 90, and checkpoint.save_interval, or raise",
        ),
        # A number, of some 10^62 years.
        (
            60.0,
            900,
            Failures(gpu_hours=0.1 * GPUS, restart_minutes=1),
            "saves are 15.0 hours apart, and the run fails every 0.1 hours: it would never end; lower "
            "checkpoint.save_interval, or raise",
        ),
    ],
    ids=["a factor", "their product", "eons"],
)
def test_a_run_that_would_never_end_is_refused(
    seconds: float, interval: int | None, failures: Failures, message: str
) -> None:
    run = planned(seconds=seconds, **({} if interval is None else {"save_interval": interval}))
    with pytest.raises(InputError) as refused:
        goodput(run, 99_900, 1e9, failures)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_takes_longer_than_the_run_lasts_is_named(is_async: bool) -> None:
    """No interval would help: it is what never ends, in turn with steps or beside them."""
    run = planned(save_interval=10, async_save=is_async)
    rate = checkpoint_bytes(run.job) / 1000
    message = (
        "a save takes 0.3 hours, and the run fails every 8 seconds: it would never end; raise --save-rate or "
        "--failure-hours"
    )
    with pytest.raises(InputError) as refused:
        goodput(run, 99_900, rate, Failures(gpu_hours=8 * GPUS / SECONDS_PER_HOUR, restart_minutes=1))
    assert str(refused.value) == message
