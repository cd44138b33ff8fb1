"""One training step on megatron-core's schedules: forward, backward, update.

The loss of a step is the mean over all tokens of the global batch that the loss mask keeps, whatever the layout:
each micro batch returns its sum and its number of tokens, and gradients are divided by the total number once.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.profiler import record_function

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.model.loss_head import LossHead
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.pipeline import Batches, run_schedule
from megatron_fanformer.train.interrupts import Interrupts
from megatron_fanformer.train.optimizer import single_optimizers


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step; the same on every rank."""

    loss: float
    """Mean cross entropy per token, in nats; 0 without tokens."""
    z_loss: float
    """Mean z-loss per token, which the gradient is of besides; 0 without `training.z_loss_coefficient`."""
    grad_norm: float
    """Global gradient norm before clipping, as `gradient_norm` has it."""
    tokens: int
    """Tokens that the loss was taken over."""
    interrupts: Interrupts
    """Interrupts of any rank before the step's numbers were summed."""


class StepBatches:
    """The micro batches of one step, taken from a stream on first use, and kept to be taken again."""

    def __init__(self, stream: Batches, count: int) -> None:
        self._stream, self._count = stream, count
        self._taken: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self._count):
            if number == len(self._taken):
                self._taken.append(next(self._stream))
            yield self._taken[number]

    def skip(self) -> None:
        """Take the step's micro batches and drop them."""
        for _ in itertools.islice(self._stream, self._count):
            pass


def wrap_stages(
    chunks: list[Any], parallel: ParallelConfig, *, grad_reduce_in_fp32: bool = True
) -> list[DistributedDataParallel]:
    """Return a stage's chunks in megatron-core's data parallelism, which sums gradients over the replicas.

    Args:
        grad_reduce_in_fp32: whether gradients are float32, or of the weights' type.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    # Read when the wrapper is made: without it gradients are averaged over replicas, and then divided by all tokens.
    config.calculate_per_token_loss = True
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
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


def drop_gradient_hooks(wrapped: list[DistributedDataParallel]) -> None:
    """Drop the hooks that megatron-core attached to the gradients, after the last step.

    A wrapped chunk holds torch's gradient nodes, a node holds its hook, and the hook holds the chunk. The nodes are C++
    objects, so Python's collector does not see this cycle: a process that trains one model after another would keep
    all models and their process groups.
    """
    for chunk in wrapped:
        chunk.grad_accs.clear()


@contextmanager
def weights_in_step(stages: list[DistributedDataParallel]) -> Iterator[None]:
    """Let code outside a training step read weights: with overlap, the last update may not be gathered yet."""
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
    num_micro_batches: int,
) -> StepResult:
    """Take a step's micro batches from `batches`, and update the weights at the optimizer's current learning rate.

    Raises:
        DivergenceError: the loss or the gradient norm is not finite; the weights are unchanged.
    """
    result = attempt_step(stages, optimizer, batches, grid, num_micro_batches)
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
    num_micro_batches: int,
    *,
    listen: Callable[[], Interrupts] = Interrupts,
) -> StepResult:
    """Compute a step up to the update: leave the gradients of the next global batch in the buffers.

    The host waits for the device where megatron-core reads the gradient norm, to clip by it; the loss is ready by then.
    megatron-core 0.16 waits once more for each chunk, after backward: `finalize_model_grads` reads whether there
    are tokens.

    Args:
        listen: returns, after backward, this rank's pending requests; all ranks learn of them with the loss.
    """
    for stage in stages:
        stage.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(stages, batches, grid, _sum_loss, num_micro_batches=num_micro_batches, forward_only=False)
    local = None
    if reports:
        sums_of_batches = torch.stack([report["loss_and_tokens"] for report in reports]).sum(0)
        head = getattr(stages[-1].module, "output_layer", None)
        z_losses = head.take_z_losses() if isinstance(head, LossHead) else None
        local = torch.cat([sums_of_batches, sums_of_batches.new_zeros(1) if z_losses is None else z_losses.view(1)])
    sums = _sum_over_ranks(local, grid, listen())
    grad_norm = gradient_norm(optimizer, grid)
    loss, tokens, z_loss, *interrupts = sums.tolist()
    return StepResult(
        loss=loss / max(tokens, 1.0),
        z_loss=z_loss / max(tokens, 1.0),
        grad_norm=grad_norm,
        tokens=int(tokens),
        interrupts=Interrupts(*(count > 0 for count in interrupts)),
    )


def gradient_norm(optimizer: MegatronOptimizer, grid: RankGrid) -> float:
    """Return the global norm of the gradients in the buffers, before clipping; waits for the device.

    Without the distributed optimizer each replica takes the norm of its sums, and so does each of several instances.
    A fault on one of their machines must not make them decide otherwise than the others, which would wait for them for
    ever: the norm is then the largest of all, and one that is not finite counts as inf.
    """
    with record_function("phase gradient norm"):
        optimizer.prepare_grads()
        local = float(optimizer.get_grad_norm())
    sharing = single_optimizers(optimizer)[0].get_grad_stats_parallel_group()
    if sharing.size() == grid.world_size:
        return local
    finite = local if math.isfinite(local) else math.inf  # NaN has no place in an order
    largest = torch.tensor(finite, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


@record_function("phase update")
def update_weights(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip the gradients, whose global norm is `grad_norm`, and update.

    (The optimizer's own `step` would compute the norm again, and spread one that is not finite.)
    """
    for part in single_optimizers(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


def _sum_loss(losses_bs: Tensor, loss_mask_bs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum to differentiate, the number of tokens that it is over, and both for the report."""
    loss = (losses_bs.float() * loss_mask_bs).sum()
    tokens = loss_mask_bs.sum()
    report = torch.stack([loss.detach().double(), tokens.double()])
    return loss, tokens.to(torch.int), {"loss_and_tokens": report}


def _sum_over_ranks(local: Tensor | None, grid: RankGrid, interrupts: Interrupts) -> Tensor:
    """Return [6] float64, on the device: losses, tokens, z-losses, and how many ranks have each of `Interrupts`, over
    all ranks.

    Only the last stage knows the loss, and each of its tensor parallel ranks knows the same one.
    """
    sums = torch.zeros(3 + len(interrupts), dtype=torch.float64, device=grid.torch_device)
    if local is not None and grid.is_last_stage and grid.groups.tp.rank() == 0:
        sums[:3] = local
    if any(interrupts):  # else there is nothing to copy to the device
        sums[3:] = torch.tensor(interrupts)
    dist.all_reduce(sums)
    return sums
