"""One training step on megatron-core's schedules: forward, backward, update.

In every layout, the loss of a step is the mean over the tokens of the global batch that the loss mask keeps: each micro
batch returns the sum of its losses and its number of tokens, and gradients are divided once by the total number.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
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
    """The numbers of one step, equal on every rank."""

    loss: float
    """Mean cross entropy per token, in nats; 0 without tokens."""
    z_loss: float
    """Mean z-loss per token, which is minimized besides `loss`; 0 without `training.z_loss_coefficient`."""
    grad_norm: float
    """Global gradient norm before clipping (`gradient_norm`)."""
    tokens: int
    """Number of tokens that `loss` is the mean of."""
    interrupts: Interrupts
    """The requests of all ranks together that were pending when the step's numbers were summed."""


class StepBatches:
    """The next `count` micro batches of a stream. They are read on first use and kept, to compute the step again."""

    def __init__(self, stream: Batches, count: int) -> None:
        self._stream, self._count = stream, count
        self._taken: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self._count):
            if number == len(self._taken):
                self._taken.append(next(self._stream))
            yield self._taken[number]

    def skip(self) -> None:
        """Read the step's micro batches from the stream and drop them."""
        for _ in itertools.islice(self._stream, self._count):
            pass


def wrap_stages(
    chunks: list[Any], parallel: ParallelConfig, *, grad_reduce_in_fp32: bool = True
) -> list[DistributedDataParallel]:
    """Wrap a stage's chunks in megatron-core's data parallelism, which sums gradients over the replicas.

    Args:
        grad_reduce_in_fp32: keep and sum gradients in float32; False: in the type of the weights.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    # Read when the stages are wrapped: if False, gradients are averaged over the replicas before they are finalized.
    config.calculate_per_token_loss = True
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
    )
    # Buckets are only for the first chunk: a later one is communicated as a whole, while earlier chunks compute.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if parallel.overlap_grad_reduce:  # without `no_sync`, the backward pass of each micro batch starts a reduction
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
def gathered_weights(stages: list[DistributedDataParallel]) -> Iterator[None]:
    """Let the block read up-to-date weights, which `overlap_param_gather` gathers only in the next forward pass."""
    overlapping = [stage for stage in stages if stage.ddp_config.overlap_param_gather]
    for stage in overlapping:
        stage.disable_forward_pre_hook(param_sync=True)  # gathers the weights now
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
    """Compute one step on the next micro batches, and update the weights at the optimizer's current learning rate.

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
    """Compute a step without the update; the gradients of the global batch stay in the buffers.

    To read the gradient norm, the host waits for the device; with megatron-core 0.16 `finalize_model_grads` waits, too.

    Args:
        listen: is called after backward and returns this rank's pending requests, which are summed with the loss.
    """
    for stage in stages:
        stage.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(stages, batches, grid, _sum_loss, num_micro_batches=num_micro_batches, forward_only=False)
    local = None
    if reports:  # only the last stage has losses to report
        loss_and_tokens = torch.stack([report["loss_and_tokens"] for report in reports]).sum(0)
        head = getattr(stages[-1].module, "output_layer", None)
        z_loss_sum = head.take_z_losses() if isinstance(head, LossHead) else None
        z_loss_or_0 = loss_and_tokens.new_zeros(1) if z_loss_sum is None else z_loss_sum.view(1)
        local = torch.cat([loss_and_tokens, z_loss_or_0])
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

    Without the distributed optimizer, each replica computes the norm by itself, and each of several optimizer instances
    does so, too. If a machine is at fault, their norms differ, but all ranks must judge the step alike, or some would
    wait forever. So the largest of these norms is returned; inf and NaN count as inf.
    """
    with record_function("phase gradient norm"):
        optimizer.prepare_grads()
        local = float(optimizer.get_grad_norm())
    norm_group = single_optimizers(optimizer)[0].get_grad_stats_parallel_group()
    if norm_group.size() == grid.world_size:
        return local  # computed by all ranks together
    comparable = local if math.isfinite(local) else math.inf  # NaN cannot be compared
    largest = torch.tensor(comparable, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


@record_function("phase update")
def update_weights(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip the gradients, whose global norm is `grad_norm`, and update the weights.

    The optimizer's method `step` would compute the norm again, and clip by it even if it is not finite.
    """
    for part in single_optimizers(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


def _sum_loss(losses_bs: Tensor, loss_mask_bs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of a micro batch's losses [samples, positions] that the mask keeps, their number, and a report."""
    loss = (losses_bs.float() * loss_mask_bs).sum()
    tokens = loss_mask_bs.sum()
    report = torch.stack([loss.detach().double(), tokens.double()])
    return loss, tokens.to(torch.int), {"loss_and_tokens": report}


def _sum_over_ranks(local: Tensor | None, grid: RankGrid, interrupts: Interrupts) -> Tensor:
    """Sum [loss, tokens, z-loss] and the requests in `interrupts` over all ranks; return [6] float64 on the device.

    Args:
        local: the first three numbers of this rank; None: it is not on the last stage. The tensor parallel ranks of the
            last stage have equal numbers, so only the first of them counts.
    """
    sums = torch.zeros(3 + len(interrupts), dtype=torch.float64, device=grid.torch_device)
    if local is not None and grid.is_last_stage and grid.groups.tp.rank() == 0:
        sums[:3] = local
    if any(interrupts):  # otherwise the zeros need no copy to the device
        sums[3:] = torch.tensor(interrupts)
    dist.all_reduce(sums)
    return sums
