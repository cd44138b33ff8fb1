"""Estimates of a run: memory and time against runs of this project on a GPU, of which no constant was fitted to;
checkpoints against one that the trainer wrote; goodput against failures drawn at random.

The GPU was one NVIDIA H100 80GB HBM3, 2026-11-23: torch 2.11 (CUDA 13.0), megatron-core 0.19.2, Transformer Engine
2.20.2; samples of 2,048 tokens, one micro batch a step, distributed optimizer. Memory is the most that torch allocated
over four steps, the time the median of four times four steps.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.model.config import PRESETS, as_transformer
from megatron_fanformer.plan.estimate import (
    SECONDS_PER_HOUR,
    Estimate,
    checkpoint_bytes,
    estimate,
    for_machine,
    goodput,
    job_of,
    storage,
)
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.machines import load_machine
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.plan.step_time import step_time
from megatron_fanformer.plan.verb import PlanOptions
from megatron_fanformer.train.config import config_from_dict
from tests.plan.runs import small_config
from tests.small_runs import small_run, train, write_tokens

FP8 = {"fp8": "hybrid"}
FP8_DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
# Model, micro batch, precision, bytes.
MEMORY = [
    ("fanformer", 4, {}, 34_157_257_728),
    ("transformer", 4, {}, 32_707_781_632),
    ("fanformer", 4, FP8, 34_962_613_248),
    ("transformer", 4, FP8, 33_244_709_888),
    ("fanformer", 8, {}, 45_539_943_424),
    ("fanformer", 8, FP8, 45_068_756_480),
    ("fanformer", 8, FP8_DELAYED, 46_144_890_368),
]
# At a micro batch of 4 the host, which launches kernels, was slower than the GPU; the formula knows no host so slow.
SECONDS = [({}, 0.2612), (FP8, 0.2343), (FP8_DELAYED, 0.2200)]


def measured_job(model: str, micro_batch: int, precision: dict[str, Any]) -> Job:
    preset = PRESETS["fanformer-1b"]
    values = {
        "model": dataclasses.asdict(preset if model == "fanformer" else as_transformer(preset)),
        "parallel": {"use_distributed_optimizer": True},
        "precision": {"dtype": "bf16", **precision},
        "data": {"train_data": ["tokens"]},
        "training": {
            "run_dir": "run",
            "train_iters": 1,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch,
        },
    }
    return job_of(for_machine(config_from_dict(values), load_machine("h100"), on_cpu=False), 1)


@pytest.mark.parametrize(("model", "micro_batch", "precision", "allocated"), MEMORY)
def test_memory(model: str, micro_batch: int, precision: dict[str, Any], allocated: int) -> None:
    predicted = rank_memory(measured_job(model, micro_batch, precision), 0).total_bytes
    assert predicted == pytest.approx(allocated, rel=0.003)


@pytest.mark.parametrize(("precision", "seconds"), SECONDS)
def test_time(precision: dict[str, Any], seconds: float) -> None:
    predicted = step_time(measured_job("fanformer", 8, precision), load_machine("h100")).seconds
    assert predicted == pytest.approx(seconds, rel=0.13)  # tensorwise FP8 is 12.2% too short, the others 4% and 7%


# -- beyond the steps

RunOnRanks = Callable[..., list[Any]]
GPUS = 8


def planned(*, seconds: float = 1.0, **checkpoint: Any) -> Estimate:
    """A small run whose steps take so long."""
    machine = load_machine("h100")
    config = for_machine(small_config(checkpoint=checkpoint, training={"global_batch_size": 16}), machine, on_cpu=False)
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
    from megatron_fanformer.checkpoint.stored_files import read_checked, tensors_of

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
    assert held == {
        "checkpoint_bytes": checkpoint_bytes(planned().job),
        "saves": saves,
        "kept": kept,
        "disk_bytes": stored * held["checkpoint_bytes"],
    }


def spent(run: Estimate, steps: int, rate: float, *, hours: float, minutes: float) -> dict[str, float]:
    options = PlanOptions(
        config=Path("run.yaml"),
        gpus=GPUS,
        gpu="h100",
        save_rate=rate / 10**9,
        failure_hours=hours * GPUS,
        restart_minutes=minutes,
    )
    found = goodput(run, steps, options)
    assert found is not None
    return found


def drawn(work: float, restart: float, between: float, saves: int) -> float:
    """Seconds of a run in all, with failures drawn at random."""
    generator = random.Random(7)
    total = 0.0
    for _ in range(saves):
        while (failed := generator.expovariate(1 / between)) < work:
            total += failed
            while (failed := generator.expovariate(1 / between)) < restart:
                total += failed
            total += restart
        total += work
    return total


def test_failures_cost_what_drawn_ones_cost() -> None:
    """A run that saves every 100 s for 20, fails every 300 s, and takes 60 s and a loading to go on."""
    run, saves = planned(save_interval=100), 20_000
    rate = checkpoint_bytes(run.job) / 20
    found = spent(run, saves * 100, rate, hours=300 / SECONDS_PER_HOUR, minutes=1)
    assert found["save_seconds"] == pytest.approx(20)
    assert found["share"] == pytest.approx(100 * saves / drawn(120, 80, 300, saves), rel=0.02)


def test_saves_in_the_background_and_rare_failures_cost_nothing() -> None:
    run = planned(save_interval=100, async_save=True)
    found = spent(run, 1000, checkpoint_bytes(run.job) / 30, hours=1e9, minutes=1)
    assert (found["best_interval_steps"], found["share"]) == (30, pytest.approx(1, abs=1e-4))
    assert spent(run, 99_900, 1e9, hours=1e-4, minutes=90)["share"] == 0  # it never ends
