"""One training step on megatron-core's schedules: forward, backward, update.

The loss of a step is the mean over all tokens of the global batch that the loss mask keeps, whatever the layout:
each micro batch returns its sum and its number of tokens, and gradients are divided by the total number once.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.ops.norms import norm
from megatron_fanformer.runtime import heartbeat
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.pipeline import Batches, run_schedule
from megatron_fanformer.training.interrupts import Interrupts


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Describe what one step showed, the same on every rank."""

    loss: float
    """Mean cross entropy per token, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    tokens: int
    """Tokens that the loss was taken over."""
    interrupts: Interrupts
    """What any rank was asked for before the step's numbers were summed."""


class Sums(NamedTuple):
    """Losses and tokens of a step's micro batches, on the device."""

    all: Tensor
    """[5] float64: losses, tokens, and how many ranks have each of `Interrupts`, summed over all ranks."""
    own: Tensor | None
    """[2] float64: losses and tokens of this rank's micro batches; None where another rank has the loss."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Describe how a step's samples reach one replica."""

    num_micro_batches: int
    micro_batch_size: int
    """Samples per micro batch."""
    seq_length: int
    """Tokens per sample, of all context parallel ranks together."""


def wrap_stages(chunks: list[Any], parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """A stage's chunks in megatron-core's data parallelism: float32 gradients, summed over the replicas."""
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    # Read when the wrapper is made: without it gradients are averaged over replicas, and then divided by all tokens.
    config.calculate_per_token_loss = True
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
    )
    # Later chunks are communicated as a whole, while earlier ones compute.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if parallel.overlap_grad_reduce:  # else each micro batch's backward would start a reduction
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def release(wrapped: list[DistributedDataParallel]) -> None:
    """Take the hooks off the gradients, after the last step.

    Each closes a cycle, through torch's C++, of weight, hook and model, which Python's collector cannot see: a process
    that trains one model after another would keep them all, with their process groups.
    """
    for chunk in wrapped:
        chunk.grad_accs.clear()


@contextmanager
def weights_in_step(stages: list[DistributedDataParallel]) -> Iterator[None]:
    """Around whatever reads weights outside a training step: with overlap, the last update may not be gathered yet."""
    overlapping = [stage for stage in stages if stage.ddp_config.overlap_param_gather]
    for stage in overlapping:
        stage.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for stage in overlapping:
            stage.enable_forward_pre_hook()


def train_step(
    stages: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: Batches,
    grid: RankGrid,
    shape: StepShape,
) -> StepResult:
    """Take a step's micro batches from `batches`, and update the weights at the optimizer's current learning rate.

    The host waits for the device once: where megatron-core reads the gradient norm, to clip by it. The loss is ready
    by then.

    Raises:
        DivergenceError: the loss or the gradient norm is not finite; the weights are unchanged.
    """
    result, _ = attempt_step(stages, optimizer, batches, grid, shape)
    for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not math.isfinite(value):
            raise DivergenceError(f"the {name} is {value}; lower optimizer.lr, or inspect the step's documents")
    update_weights(optimizer, result.grad_norm)
    return result


def attempt_step(
    stages: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: Batches,
    grid: RankGrid,
    shape: StepShape,
    *,
    listen: Callable[[], Interrupts] = Interrupts,
) -> tuple[StepResult, Sums]:
    """`train_step` up to the update: what the step shows, its gradients in the buffers.

    Args:
        listen: says, after backward, what this rank was asked for; all ranks learn of it with the loss.
    """
    sums = compute_gradients(stages, optimizer, batches, grid, shape, listen=listen)
    grad_norm = gradient_norm(optimizer)
    loss, tokens, interrupts = read_sums(sums)
    return StepResult(loss=loss, grad_norm=grad_norm, tokens=tokens, interrupts=interrupts), sums


def compute_gradients(
    stages: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: Batches,
    grid: RankGrid,
    shape: StepShape,
    *,
    listen: Callable[[], Interrupts] = Interrupts,
) -> Sums:
    """Leave the gradients of the next global batch in the buffers; returns its sums for `read_sums`."""
    for stage in stages:
        stage.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(
        stages,
        batches,
        grid,
        _sum_loss,
        num_micro_batches=shape.num_micro_batches,
        micro_batch_size=shape.micro_batch_size,
        seq_length=shape.seq_length,
        forward_only=False,
    )
    return _sum_over_ranks(reports, grid, listen())


def read_sums(sums: Sums) -> tuple[float, int, Interrupts]:
    """Mean loss per token, tokens, and what any rank was asked for; waits for the device."""
    loss, tokens, *interrupts = sums.all.tolist()
    return loss / max(tokens, 1.0), int(tokens), Interrupts(*(count > 0 for count in interrupts))


def local_loss_and_grad_norm(stages: list[DistributedDataParallel], sums: Sums) -> tuple[float, float]:
    """This rank's own mean loss (0 where another rank has it), and the norm of the gradients in its buffers.

    They are compared with those of another attempt at the same step, to find the rank that computed otherwise.
    """
    loss, tokens = (0.0, 1.0) if sums.own is None else sums.own.tolist()
    buffers = [buffer for stage in stages for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]
    return loss / max(tokens, 1.0), math.hypot(*(norm(buffer.grad_data).item() for buffer in buffers))


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """The global norm of the gradients in the buffers, before clipping; waits for the device."""
    heartbeat.mark("gradient norm")
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update_weights(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip the gradients, whose global norm is `grad_norm`, and update.

    (The optimizer's own `step` would compute the norm again, and spread one that is not finite.)
    """
    heartbeat.mark("update")
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


def _sum_loss(losses_bs: Tensor, loss_mask_bs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum to differentiate, the number of tokens that it is over, and both for the report."""
    loss = (losses_bs.float() * loss_mask_bs).sum()
    tokens = loss_mask_bs.sum()
    report = torch.stack([loss.detach().double(), tokens.double()])
    return loss, tokens.to(torch.int), {"loss_and_tokens": report}


def _sum_over_ranks(reports: list[dict[str, Tensor]], grid: RankGrid, interrupts: Interrupts) -> Sums:
    """Only the last stage knows the loss, and each of its tensor parallel ranks knows the same one."""
    sums = torch.zeros(2 + len(interrupts), dtype=torch.float64, device=grid.torch_device)
    own = torch.stack([report["loss_and_tokens"] for report in reports]).sum(0) if reports else None
    if own is not None and grid.is_last_stage and grid.groups.tp.rank() == 0:
        sums[:2] = own
    if any(interrupts):  # else there is nothing to copy to the device
        sums[2:] = torch.tensor(interrupts)
    heartbeat.mark("summing the loss")
    dist.all_reduce(sums)
    return Sums(sums, own)
