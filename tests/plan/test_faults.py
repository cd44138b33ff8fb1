"""Planted faults: each must be found by the comparison of formula and count, and named."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fanformer.plan import communication, gradient_buffers
from megatron_fanformer.plan.rank import PEAK_TOLERANCE, SimulatedRank, run_rank
from megatron_fanformer.train import step
from tests.plan.runs import run_config

WORLD = 64
CONFIG = run_config(
    samples=64, tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2, dtype="bf16"
)
LAST_STAGE = WORLD // 2


def last_stage() -> SimulatedRank:
    return run_rank(CONFIG, world_size=WORLD, rank=LAST_STAGE)


@pytest.fixture(scope="module")
def sound() -> SimulatedRank:
    simulated = last_stage()
    assert simulated.communication_differences() == []
    return simulated


def double_a_gather(patch: pytest.MonkeyPatch) -> None:
    """In front of every column parallel map."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim

    def twice(*args: Any, **kwargs: Any) -> torch.Tensor:
        gather(*args, **kwargs)
        return gather(*args, **kwargs)

    patch.setattr(mappings, "_gather_along_first_dim", twice)


def pad_buckets_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        step,
        "DistributedDataParallelConfig",
        functools.partial(step.DistributedDataParallelConfig, pad_buckets_for_high_nccl_busbw=True),
    )


def forget_the_head(patch: pytest.MonkeyPatch) -> None:
    def chunks(*args: Any) -> list[gradient_buffers.Chunk]:
        return [dataclasses.replace(chunk, has_head=False) for chunk in gradient_buffers.chunks(*args)]

    patch.setattr(communication, "chunks", chunks)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (double_a_gather, {"tp all-gather"}),
    (pad_buckets_otherwise, {"dp_cp all-gather", "dp_cp reduce-scatter"}),
    (
        forget_the_head,
        {
            "tp all-gather",
            "tp all-reduce",
            "tp reduce-scatter",
            "dp_cp all-gather",
            "dp_cp reduce-scatter",
            "embd all-reduce",
        },
    ),
]


@pytest.mark.parametrize(("plant", "named"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_named(
    plant: Callable[[pytest.MonkeyPatch], None],
    named: set[str],
    sound: SimulatedRank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    lines = last_stage().communication_differences()
    assert {line.split(": ")[1] for line in lines} == named
    assert all(line.startswith(f"stage 1 (rank {LAST_STAGE} of {WORLD}): ") for line in lines)


def test_a_line_has_calls_and_bytes_of_both(sound: SimulatedRank) -> None:
    (norm,) = (line for line in sound.collectives if line.group == "embd")
    fewer = [line for line in sound.collectives if line is not norm]
    (line,) = dataclasses.replace(sound, collectives=fewer).communication_differences()
    assert line == (
        f"stage 1 (rank {LAST_STAGE} of {WORLD}): embd all-reduce: counted 0 calls of 0 bytes, by formula 1 calls of "
        f"{norm.message_bytes:,} bytes"
    )


def test_a_peak_may_be_off_by_the_tolerance(sound: SimulatedRank) -> None:
    formula = sound.formula_peak_bytes
    near, far = (dataclasses.replace(sound, peak_bytes=round(formula * (1 + PEAK_TOLERANCE * k))) for k in (0.9, 1.2))
    assert near.peak_differences() == []
    (line,) = far.peak_differences()
    assert f"memory: counted a peak of {far.peak_bytes:,} bytes, by formula {formula:,}, -" in line
