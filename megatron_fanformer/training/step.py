"""One training or evaluation step on megatron-core's schedules: forward, backward, update.

The loss of a step is the mean over all tokens of the global batch that the loss mask keeps, whatever the layout:
each micro batch hands on its sum and its number of tokens, and gradients are divided by the whole number once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid

Batches = Iterator[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step showed, the same on every rank."""

    loss: float
    """Mean cross entropy a token, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    tokens: int
    """Tokens that the loss was taken over."""


def wrap_stage(stage: Any, parallel: ParallelConfig) -> DistributedDataParallel:
    """The stage in megatron-core's data parallelism: float32 gradients, summed over the replicas."""
    stage.config.finalize_model_grads_func = finalize_model_grads
    # Read when the wrapper is made: without it gradients are averaged over replicas, and then divided by all tokens.
    stage.config.calculate_per_token_loss = True
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=parallel.use_distributed_optimizer
    )
    return DistributedDataParallel(stage.config, ddp_config, stage)


def train_step(
    stages: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: Batches,
    grid: RankGrid,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
) -> StepResult:
    """Take `num_micro_batches` from `batches`, and update the weights at the optimizer's present learning rate.

    Raises:
        DivergenceError: the loss or the gradient norm is not finite; the weights are as they were.
    """
    for stage in stages:
        stage.zero_grad_buffer()
    optimizer.zero_grad()
    loss, tokens = _run_schedule(
        stages, batches, grid, num_micro_batches, micro_batch_size, seq_length, forward_only=False
    )
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss is {loss}; lower optimizer.lr, or look at the step's documents")
    grad_norm = _gradient_norm(optimizer)
    if not math.isfinite(grad_norm):
        raise DivergenceError(f"the gradient norm is {grad_norm}; lower optimizer.lr, or look at the step's documents")
    optimizer.step()
    return StepResult(loss=loss, grad_norm=grad_norm, tokens=tokens)


def _gradient_norm(optimizer: MegatronOptimizer) -> float:
    """The global norm, before clipping; taken before the update, which would spread what is not finite."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def evaluation_step(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
) -> tuple[float, int]:
    """Mean loss and number of tokens of the next `num_micro_batches`, over all replicas."""
    return _run_schedule(stages, batches, grid, num_micro_batches, micro_batch_size, seq_length, forward_only=True)


def _run_schedule(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    *,
    forward_only: bool,
) -> tuple[float, int]:
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches,
        model=stages,
        num_microbatches=num_micro_batches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return _mean_loss(reports, grid)


def _forward_step(batches: Batches, stage: Any) -> tuple[Tensor, Any]:
    device = next(stage.parameters()).device
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
    output = stage(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, lambda losses: _sum_loss(losses, batch["loss_mask"])


def _sum_loss(losses_bs: Tensor, loss_mask_bs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum to differentiate, the number of tokens that it is over, and both for the report."""
    loss = (losses_bs.float() * loss_mask_bs).sum()
    tokens = loss_mask_bs.sum()
    report = torch.stack([loss.detach().double(), tokens.double()])
    return loss, tokens.to(torch.int), {"loss_and_tokens": report}


def _mean_loss(reports: list[dict[str, Tensor]], grid: RankGrid) -> tuple[float, int]:
    """The mean over all micro batches and replicas; the last stage knows it, and tells the others."""
    total = torch.zeros(2, dtype=torch.float64, device=grid.torch_device)
    if grid.is_last_stage:
        total = torch.stack([report["loss_and_tokens"] for report in reports]).sum(0)
    dist.all_reduce(total, group=grid.groups.dp_cp)
    dist.all_reduce(total, group=grid.groups.pp)
    loss_sum, tokens = total.tolist()
    return loss_sum / max(tokens, 1.0), int(tokens)
