"""Two ranks on one GPU, which NCCL refuses: over gloo they train what one rank does; skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.making import SAME_LOSS, finished, gpu_run, write_learnable_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_learnable_tokens(tmp_path_factory.mktemp("tokens") / "learnable")


@pytest.fixture(scope="module")
def losses_of_one(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    return finished(gpu_run(tokens, folder / "run"), folder / "config.yaml")


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
    layout: dict[str, Any], tokens: str, losses_of_one: list[float], tmp_path: Path
) -> None:
    runtime = {"distributed_backend": "gloo"}
    values = gpu_run(tokens, tmp_path / "run", parallel=layout, runtime=runtime)
    losses = finished(values, tmp_path / "config.yaml")
    assert losses == pytest.approx(losses_of_one, abs=SAME_LOSS)
