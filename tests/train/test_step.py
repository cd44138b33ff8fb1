"""Steps of training against the numbers of the authors' implementation, in float32."""

import functools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.plain_model import train_plain
from tests.train.layouts import (
    CASES,
    REFERENCE,
    gather,
    layout,
    reference_tensors,
    set_weights,
    shards_of,
    train_reference,
)
from tests.whole_models import TOKEN_LOSS, logits_bound, read_reference, reference_to_megatron

GRADIENT = 1e-4  # relative, in norm

FULL = pytest.mark.full
FOUR_LAYERS = "fanformer-untied-p0125"
STABLE_LR = 1e-4  # float32 rounding grows to 3e-6 of the loss and 7e-5 of the gradient norm in 40 steps
PLAIN_LOSS = 2e-5  # absolute
PLAIN_GRAD_NORM = 5e-4  # relative
PLAIN_WEIGHTS = 2e-5  # absolute; 40 steps move a weight by up to 4e-3


def forward_and_backward(case: str, parallel: ParallelConfig) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits, token losses and gradient pieces of this rank on the reference's batch."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config, tensors = reference_tensors(case)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    positions = torch.arange(64).expand(4, 64)
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        (stage,) = build_stages(config, parallel, grid, dtype=torch.float32, seed=None)
        set_weights([stage], grid, tensors)
        with torch.no_grad():
            logits = gather_from_tensor_model_parallel_region(stage(expected["input_ids"], positions, None))
        losses = stage(expected["input_ids"], positions, None, labels=expected["labels"])
        losses.mean().backward()
        sum_sequence_parallel_gradients(stage, grid)
        return logits, losses.detach(), shards_of([stage], grid, gradients=True)


def sum_sequence_parallel_gradients(stage: torch.nn.Module, grid: Any) -> None:
    """What megatron-core's finalize_model_grads does at the end of a step, for weights that see a part of s."""
    for parameter in stage.parameters():
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad, group=grid.groups.tp)


@pytest.mark.parametrize(
    ("form", "case"),
    [
        *(("", case) for case in CASES),
        *((form, FOUR_LAYERS) for form in ("tp=2", "tp=2,sp=true", "tp=2,sp=true,fan=sequence")),
    ],
)
def test_logits_losses_and_gradients(run_on_ranks: Any, case: str, form: str) -> None:
    parallel = layout(form)
    ranks = run_on_ranks(parallel.tensor_model_parallel_size, forward_and_backward, case, parallel)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    bound = logits_bound(REFERENCE / case)
    for logits, losses, _ in ranks:
        torch.testing.assert_close(logits, expected["logits"], atol=bound, rtol=0)
        torch.testing.assert_close(losses, expected["token_loss"], atol=TOKEN_LOSS, rtol=0)
    gradients = gather([pieces for _, _, pieces in ranks])
    config, _ = read_reference(REFERENCE / case)
    wanted = reference_to_megatron(
        {name.removeprefix("grad."): value for name, value in expected.items() if name.startswith("grad.")}, config
    )
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < GRADIENT, f"{name}: {error}"


@functools.cache
def plain_training(case: str, lr: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same training by the plain model in float64: what arithmetic without rounding gives."""
    weights = load_file(REFERENCE / case / "model.safetensors")
    stream = load_file(REFERENCE / case / "stream.safetensors")["stream"]
    return train_plain(weights, stream, heads=4, lr=lr, dtype=torch.float64)


@pytest.mark.parametrize("case", [FOUR_LAYERS, pytest.param("fanformer-tied", marks=FULL)])
def test_forty_steps_follow_the_plain_model(run_on_ranks: Any, case: str) -> None:
    """At a rate where rounding does not grow, all 40 steps and the final weights are held against float64.

    parity and the golden losses hold layouts to one process.
    """
    [trained] = run_on_ranks(1, train_reference, case, layout(), STABLE_LR)
    losses, norms, plain_weights = plain_training(case, STABLE_LR)
    assert trained.losses == pytest.approx(losses, abs=PLAIN_LOSS, rel=0)
    assert trained.grad_norms == pytest.approx(norms, rel=PLAIN_GRAD_NORM, abs=0)
    weights = gather([trained.weights])
    config, _ = read_reference(REFERENCE / case)
    expected = reference_to_megatron({name: weight.float() for name, weight in plain_weights.items()}, config)
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected[name], atol=PLAIN_WEIGHTS, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
