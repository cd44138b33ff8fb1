"""Training steps with the Triton kernels, in their interpreter, against the same steps in PyTorch."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.ops.triton_kernels import needs_triton

STEPS, MICRO_BATCHES, SAMPLES, TOKENS, LAYERS = 2, 2, 2, 8, 2
SAME_LOSS = 1e-6  # relative: a few roundings of float32, of sums in another order
SAME_WEIGHTS = 1e-5  # norm of the difference over the norm; Adam divides gradients by their own size


class Trained(NamedTuple):
    """What some steps led to, and how often each kernel ran."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    launches: dict[str, int]


def train(by_kernel: bool) -> Trained:
    """Train a model with two FAN outputs and GELU, so that the kernels' every branch runs."""
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()
    from megatron_fanformer.model.build import build_stages
    from megatron_fanformer.model.config import FANConfig
    from megatron_fanformer.ops import cross_entropy_triton, fan_activation_triton, triton_support
    from megatron_fanformer.runtime.config import RuntimeConfig
    from megatron_fanformer.runtime.parallel import ParallelConfig, distributed
    from megatron_fanformer.runtime.seeding import seed_everything
    from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
    from megatron_fanformer.train.step import train_step, wrap_stages
    from tests.tiny import tiny_model

    fan = FANConfig(placement="qk_and_v", activation="gelu")
    model = tiny_model(fan=fan, num_layers=LAYERS, seq_length=TOKENS)
    parallel = ParallelConfig(use_distributed_optimizer=False)
    kernels = (
        (fan_activation_triton, "activate"),
        (fan_activation_triton, "differentiate"),
        (cross_entropy_triton, "exponentials"),
    )
    with ExitStack() as stack:
        if by_kernel:
            stack.enter_context(triton_support.reaching("cpu"))
        counted = {
            name: stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in kernels
        }
        grid = stack.enter_context(
            distributed(parallel, runtime=RuntimeConfig(device="cpu", threads_per_rank=1, cpu_kernels="torch"))
        )
        seed_everything(0)
        stages = build_stages(model, parallel, grid, dtype=torch.float32, seed=1)
        wrapped = wrap_stages(stages, parallel)
        optimizer = build_optimizer(OptimizerConfig(), wrapped)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-3, 0.1
        batches = random_batches(model.vocab_size)
        losses = [train_step(wrapped, optimizer, batches, grid, MICRO_BATCHES).loss for _ in range(STEPS)]
        weights = {name: weight.detach().clone() for name, weight in stages[0].named_parameters()}
        return Trained(losses, weights, {name: call.call_count for name, call in counted.items()})


def random_batches(vocab_size: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(TOKENS).expand(SAMPLES, TOKENS)
    while True:
        tokens = torch.randint(vocab_size, (SAMPLES, TOKENS + 1), generator=generator)
        mask = torch.ones(SAMPLES, TOKENS)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


@pytest.mark.full
@needs_triton
def test_steps_with_the_kernels_are_steps_without(interpreter: ProcessPoolExecutor) -> None:
    kernel, plain = (interpreter.submit(train, by_kernel).result() for by_kernel in (True, False))
    passes = STEPS * MICRO_BATCHES
    each_way = 2 * LAYERS * passes  # of X_F and of the values
    assert kernel.launches == {"activate": each_way, "differentiate": each_way, "exponentials": passes}
    assert set(plain.launches.values()) == {0}
    assert kernel.losses == pytest.approx(plain.losses, rel=SAME_LOSS, abs=0)
    for name, weight in kernel.weights.items():
        assert (weight - plain.weights[name]).norm() <= SAME_WEIGHTS * plain.weights[name].norm(), name
