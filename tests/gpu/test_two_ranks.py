"""Two ranks on one GPU, which NCCL refuses: over gloo they train what one rank does; skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.making import SAME_LOSS, finished, gpu_run, needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
    ],
    ids=["dp2", "tp2", "tp2-sp", "tp2-sp-fan-sequence"],
)
def test_two_ranks_train_the_model_of_one(
    layout: dict[str, Any], tokens: str, bf16_losses: list[float], tmp_path: Path
) -> None:
    runtime = {"distributed_backend": "gloo"}
    values = gpu_run(tokens, tmp_path / "run", parallel=layout, runtime=runtime)
    losses = finished(values, tmp_path / "config.yaml")
    assert losses == pytest.approx(bf16_losses, abs=SAME_LOSS)
