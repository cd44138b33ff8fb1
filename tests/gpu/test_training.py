"""Runs on a GPU in FP8, with gradients added inside products, and by CUDA graphs; skipped where there is none."""

from pathlib import Path

import pytest

from tests.gpu.making import SAME_LOSS, finished, finished_metrics, gpu_run, needs_engine, needs_gpu, needs_real_gpu

pytestmark = needs_gpu

# FP8's e4m3 keeps three bits; over a dozen steps of falling loss, in nats. No machine has shown it yet.
FP8_LOSS = 0.2


def assert_near(losses: list[float], others: list[float], bound: float) -> None:
    assert len(losses) == len(others)
    assert max(abs(loss - other) for loss, other in zip(losses, others, strict=True)) < bound


# -- FP8


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_an_fp8_run_learns_as_bf16_does(recipe: str, tokens: str, bf16_losses: list[float], tmp_path: Path) -> None:
    needs_engine(recipe)
    precision = {"dtype": "bf16", "fp8": "hybrid", "fp8_recipe": recipe}
    losses = finished(gpu_run(tokens, tmp_path / "run", precision=precision), tmp_path / "config.yaml")
    assert losses != bf16_losses
    assert losses[-1] < losses[0]
    assert_near(losses, bf16_losses, FP8_LOSS)


# -- gradients added inside the products


def test_fused_gradient_accumulation_gives_the_same_gradients(tokens: str, tmp_path: Path) -> None:
    needs_engine()
    shown = {}
    for fused in (True, False):
        values = gpu_run(
            tokens,
            tmp_path / str(fused),
            steps=3,
            kernels={"gradient_accumulation_fusion": fused},
            schedule={"lr_warmup_iters": 1},
            training={"train_iters": 3, "global_batch_size": 4, "micro_batch_size": 1},  # four are added up
        )
        shown[fused] = finished_metrics(values, tmp_path / f"{fused}.yaml")
    for ours, others in zip(shown[True], shown[False], strict=True):
        assert ours["loss"] == pytest.approx(others["loss"], abs=SAME_LOSS)
        assert ours["grad_norm"] == pytest.approx(others["grad_norm"], rel=0.02)  # unfused ones round to bf16 first


# -- CUDA graphs


@needs_real_gpu
def test_layers_replayed_as_cuda_graphs_train_the_same_model(
    tokens: str, bf16_losses: list[float], tmp_path: Path
) -> None:
    needs_engine()
    values = gpu_run(tokens, tmp_path / "run", kernels={"cuda_graph_impl": "local"})
    assert_near(finished(values, tmp_path / "config.yaml"), bf16_losses, SAME_LOSS)
