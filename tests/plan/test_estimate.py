"""Estimates of a run: memory and time against runs of this project on a GPU, of which no constant was fitted to;
checkpoints against one that the trainer wrote.

The GPU was one NVIDIA H100 80GB HBM3, 2026-11-23: torch 2.11 (CUDA 13.0), megatron-core 0.19.2, Transformer Engine
2.20.2; samples of 2,048 tokens, one micro batch a step, distributed optimizer. Memory is the most that torch allocated
over four steps, the time the median of four times four steps.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.model.config import PRESETS, as_transformer
from megatron_fanformer.plan.estimate import checkpoint_bytes, job_of, resolve_for_machine
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.machines import load_machine
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.plan.step_time import step_time
from megatron_fanformer.train.config import config_from_dict
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
    return job_of(resolve_for_machine(config_from_dict(values), load_machine("h100")), 1)


@pytest.mark.parametrize(("model", "micro_batch", "precision", "allocated"), MEMORY)
def test_memory(model: str, micro_batch: int, precision: dict[str, Any], allocated: int) -> None:
    predicted = rank_memory(measured_job(model, micro_batch, precision), 0).total_bytes
    assert predicted == pytest.approx(allocated, rel=0.003)


@pytest.mark.parametrize(("precision", "seconds"), SECONDS)
def test_time(precision: dict[str, Any], seconds: float) -> None:
    predicted = step_time(measured_job("fanformer", 8, precision), load_machine("h100")).seconds
    assert predicted == pytest.approx(seconds, rel=0.13)  # tensorwise FP8 is 12.2% too short, the others 4% and 7%


# -- a checkpoint

RunOnRanks = Callable[..., list[Any]]


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
