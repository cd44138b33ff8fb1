"""A run that was stopped goes on bit by bit on a GPU, in deterministic mode; skipped where there is none."""

from pathlib import Path

import pytest
import torch

from megatron_fanformer.convert.recognition import find_checkpoint
from tests.gpu.making import STEPS, finished, gpu_run, needs_engine, needs_gpu
from tests.whole_models import read_full_tensors

pytestmark = needs_gpu

HALF = STEPS // 2


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
def test_a_resume_is_the_same_bit_by_bit(recipe: str | None, tokens: str, tmp_path: Path) -> None:
    if recipe:
        needs_engine(recipe)
    precision = {"dtype": "bf16", **({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {})}
    runtime = {"deterministic_mode": True}
    straight = gpu_run(tokens, tmp_path / "straight", runtime=runtime, precision=precision)
    stopping = gpu_run(
        tokens,
        tmp_path / "resumed",
        runtime=runtime,
        precision=precision,
        training={"train_iters": STEPS, "exit_interval": HALF},
    )
    expected = finished(straight, tmp_path / "straight.yaml")
    assert len(finished(stopping, tmp_path / "stopping.yaml")) == HALF
    assert finished(stopping, tmp_path / "stopping.yaml") == expected
    ours, others = (read_full_tensors(find_checkpoint(tmp_path / run)) for run in ("straight", "resumed"))
    assert ours.keys() == others.keys()
    assert [name for name in ours if not torch.equal(ours[name], others[name])] == []
