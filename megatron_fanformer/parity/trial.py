"""Tries a layout on one rank: trains some steps from initial weights that all layouts share, and records the steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS, micro_batches, shared_batches
from megatron_fanformer.model.build import build_stages, draw_weight, sharded_state
from megatron_fanformer.model.config import DEFAULT_KERNELS, FANformerConfig, KernelsConfig, torch_dtype
from megatron_fanformer.parity.recording import (
    OutputRecorder,
    TensorPart,
    gather_gradients,
    restored_output,
    weight_parts,
)
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.runtime.layout import DEFAULT_RUNTIME, DeviceKind, ParallelConfig, RuntimeConfig
from megatron_fanformer.runtime.parallel import RankGrid, cpu_kernels_of, rank_grid
from megatron_fanformer.runtime.seeding import generator_for, initialize_by_name, seed_everything
from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
from megatron_fanformer.train.schedule import ScheduleConfig, build_scheduler
from megatron_fanformer.train.step import attempt_step, gathered_weights, train_step, update_weights, wrap_stages

SEED = 1234
DOCUMENT_TOKENS = 8
"""Mean length of a document if attention stays within documents: so short that each sample has several."""
SHAKE = 0.1
"""Standard deviation of noise on initial norms and biases: without it, a norm of ones could be left out unnoticed."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """The settings with which every layout is trained."""

    model: FANformerConfig
    optimizer: OptimizerConfig
    global_batch_size: int
    micro_batch_size: int
    steps: int
    dtype: Literal["fp32", "bf16"]
    device: DeviceKind
    within_documents: bool = False
    """Whether attention stays within documents, as `data.reset_attention_mask` has it."""
    z_loss_coefficient: float = 0.0
    grad_reduce_in_fp32: bool = True
    kernels: KernelsConfig = DEFAULT_KERNELS
    runtime: RuntimeConfig = DEFAULT_RUNTIME


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The record of one rank's trial."""

    losses: list[float]
    outputs: list[TensorPart]
    """Outputs of modules in the first step, in forward order."""
    gradients: list[TensorPart]
    """Gradients of the first step, before clipping."""
    initial: list[TensorPart]
    """Weights before the first step."""
    weights: list[TensorPart]
    """Weights after the last step."""


class Preparation(NamedTuple):
    """The objects with which a rank trains."""

    grid: RankGrid
    stages: list[Any]
    wrapped: list[Any]  # the chunks of `stages`, wrapped for data parallelism
    optimizer: Any
    batches: Any
    num_micro_batches: int
    initial: list[TensorPart]


@contextmanager
def prepare_rank(trial: TrialConfig, layout: ParallelConfig, order: Reordering) -> Iterator[Preparation]:
    """Yield the objects with which this rank trains in a layout, before the first step."""
    with cpu_kernels_of(trial.runtime, trial.device), rank_grid(layout, trial.device, trial.runtime) as grid:
        seed_everything(SEED)
        dtype = torch_dtype(trial.dtype)
        z_loss, kernels = trial.z_loss_coefficient, trial.kernels
        stages = build_stages(
            trial.model, layout, grid, dtype=dtype, seed=None, kernels=kernels, z_loss_coefficient=z_loss
        )
        for chunk in stages:
            initialize_by_name(sharded_state(chunk, grid), SEED, partial(_initial_weight, trial.model, order))
        initial = weight_parts(stages, grid, order)
        wrapped = wrap_stages(stages, layout, grad_reduce_in_fp32=trial.grad_reduce_in_fp32)
        optimizer = build_optimizer(trial.optimizer, wrapped)
        schedule = ScheduleConfig(lr_decay_style="constant")
        build_scheduler(schedule, optimizer, trial.optimizer, train_iters=trial.steps).step(1)  # sets the learning rate
        num_micro_batches = trial.global_batch_size // (trial.micro_batch_size * grid.data_parallel_size)
        yield Preparation(grid, stages, wrapped, optimizer, _batches(trial, order, grid), num_micro_batches, initial)


def run_trial(trial: TrialConfig, layout: ParallelConfig, number: int = 0) -> Trace:
    """Train in a layout, and return this rank's trace; every rank calls this. `number` is that of the reordering."""
    order = Reordering(trial.model, trial.global_batch_size, number)
    with prepare_rank(trial, layout, order) as (grid, stages, wrapped, optimizer, batches, num_micro_batches, initial):
        with OutputRecorder(stages, grid, trial.global_batch_size, trial.micro_batch_size) as recorder:
            first = attempt_step(wrapped, optimizer, batches, grid, num_micro_batches)
        losses = [first.loss]
        gather_gradients(wrapped)
        gradients = weight_parts(stages, grid, order, of_gradients=True)
        update_weights(optimizer, first.grad_norm)
        for _ in range(trial.steps - 1):
            losses.append(train_step(wrapped, optimizer, batches, grid, num_micro_batches).loss)
        with gathered_weights(wrapped):
            weights = weight_parts(stages, grid, order)
    outputs = [restored_output(part, order) for part in recorder.parts]
    return Trace(losses=losses, outputs=outputs, gradients=gradients, initial=initial, weights=weights)


def _initial_weight(
    model: FANformerConfig, order: Reordering, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Return the initial value of the whole weight `name`, reordered."""
    weight = draw_weight(model, name, shape, generator)
    if weight.ndim == 1:  # a norm or a bias, which a layout could otherwise leave out unnoticed
        weight = weight + SHAKE * torch.randn(shape, generator=generator)
    return order.tensor(name, weight)


# -- data


def _batches(trial: TrialConfig, order: Reordering, grid: RankGrid) -> Iterator[dict[str, Tensor]]:
    """Return the micro batches of this rank's replica, which the replica's ranks share as in a training run."""
    return shared_batches(
        lambda: micro_batches(
            Samples(trial, order),
            consumed_samples=0,
            micro_batch_size=trial.micro_batch_size,
            data_parallel_rank=grid.data_parallel_rank,
            data_parallel_size=grid.data_parallel_size,
        ),
        grid.samples_group,
        micro_batch_size=trial.micro_batch_size,
        seq_length=trial.model.seq_length,
        has_document_ids=trial.within_documents,
        is_used=grid.takes_samples(has_document_ids=trial.within_documents),
    )


class Samples:
    """A dataset of arithmetic progressions modulo the vocabulary, with some noise: learnable, and without files."""

    def __init__(self, trial: TrialConfig, order: Reordering) -> None:
        self._trial, self._order = trial, order

    def __len__(self) -> int:
        return self._trial.steps * self._trial.global_batch_size

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        model = self._trial.model
        generator = generator_for(SEED, f"sample {self._order.sample(position)}")
        start, stride = torch.randint(model.vocab_size, (2,), generator=generator)
        noise = torch.rand(model.seq_length + 1, generator=generator) < 0.1
        tokens = (start + (stride % 8) * torch.arange(model.seq_length + 1) + noise) % model.vocab_size
        tokens = self._order.tokens(tokens)
        sample = {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": (torch.rand(model.seq_length, generator=generator) < 0.9).float(),
            "position_ids": torch.arange(model.seq_length),
        }
        if self._trial.within_documents:
            begins = torch.rand(model.seq_length, generator=generator) < 1 / DOCUMENT_TOKENS
            sample[DOCUMENT_IDS] = begins.cumsum(0).int()
        return sample
