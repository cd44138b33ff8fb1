"""The trainer against the numbers of the authors' implementation, in float32."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fanformer.conversion.mapping import reference_to_megatron
from megatron_fanformer.conversion.reference import read_reference
from megatron_fanformer.model.build import build_stage
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.training.layouts import (
    CASES,
    REFERENCE,
    expected_training,
    gather,
    layout,
    reference_tensors,
    set_weights,
    shards_of,
    train_reference,
)

LOGITS = 2e-5  # absolute
GRADIENT = 1e-4  # relative, in norm
TRAINING_LOSS = 1e-3  # absolute, each of 40 steps
TRAINING_GRAD_NORM = 0.01  # relative, each of 40 steps
FINAL_WEIGHTS_SUM = 0.05  # absolute, of a sum over all weights of about 500


def forward_and_backward(case: str, parallel: ParallelConfig) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits, token losses and gradient pieces of this rank on the reference's batch."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config, tensors = reference_tensors(case)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    positions = torch.arange(64).expand(4, 64)
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        stage = build_stage(config, parallel, grid, dtype=torch.float32, seed=None)
        set_weights(stage, grid, tensors)
        with torch.no_grad():
            logits = gather_from_tensor_model_parallel_region(stage(expected["input_ids"], positions, None))
        losses = stage(expected["input_ids"], positions, None, labels=expected["labels"])
        losses.mean().backward()
        sum_sequence_parallel_gradients(stage, grid)
        return logits, losses.detach(), shards_of(stage, grid, gradients=True)


def sum_sequence_parallel_gradients(stage: torch.nn.Module, grid: Any) -> None:
    """What megatron-core's finalize_model_grads does at the end of a step, for weights that see a part of s."""
    for parameter in stage.parameters():
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad, group=grid.groups.tp)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("tensor", "sequence_parallel"), [(1, False), (2, False), (4, False), (2, True)], ids=["tp1", "tp2", "tp4", "tp2-sp"]
)
def test_logits_losses_and_gradients(run_on_ranks: Any, case: str, tensor: int, sequence_parallel: bool) -> None:
    parallel = layout(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel)
    ranks = run_on_ranks(tensor, forward_and_backward, case, parallel)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    for logits, losses, _ in ranks:
        torch.testing.assert_close(logits, expected["logits"], atol=LOGITS, rtol=0)
        torch.testing.assert_close(losses, expected["token_loss"], atol=LOGITS, rtol=0)
    gradients = gather([pieces for _, _, pieces in ranks])
    config, _ = read_reference(REFERENCE / case)
    wanted = reference_to_megatron(
        {name.removeprefix("grad."): value for name, value in expected.items() if name.startswith("grad.")}, config
    )
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < GRADIENT, f"{name}: {error}"


def pipeline_size(case: str) -> int:
    return 2 if case == "fanformer-untied-p0125" else 3  # it has four layers, the others three


def training_layouts(case: str) -> dict[str, ParallelConfig]:
    return {
        "tp1": layout(),
        "tp1-plain-optimizer": layout(use_distributed_optimizer=False),
        "tp2": layout(tensor_model_parallel_size=2),
        "tp2-sp": layout(tensor_model_parallel_size=2, sequence_parallel=True),
        "pp": layout(pipeline_model_parallel_size=pipeline_size(case)),
        "dp2-distributed": layout(data_parallel_size=2),
        "dp2-plain": layout(data_parallel_size=2, use_distributed_optimizer=False),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", training_layouts("atl"))
def test_forty_steps_of_training(run_on_ranks: Any, case: str, name: str) -> None:
    parallel = training_layouts(case)[name]
    world = parallel.model_parallel_size * (parallel.data_parallel_size or 1)
    ranks = run_on_ranks(world, train_reference, case, parallel)
    expected = expected_training(case)
    for trained in ranks:
        assert trained.losses == pytest.approx(expected["loss"], abs=TRAINING_LOSS, rel=0)
        assert trained.grad_norms == pytest.approx(expected["grad_norm"], rel=TRAINING_GRAD_NORM, abs=0)
    weights = gather([trained.weights for trained in ranks])
    total = sum(float(weight.double().sum()) for weight in weights.values())
    assert total == pytest.approx(expected["final_params_sum"], abs=FINAL_WEIGHTS_SUM)
