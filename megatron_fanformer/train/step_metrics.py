"""Metrics of a run's steps: loss, speed, and at intervals those that read every weight."""

import resource
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.plan.flops import training_flops_per_token
from megatron_fanformer.plan.machines import machine_of_device
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.optimizer import weight_and_update_norms
from megatron_fanformer.train.step import StepResult


class StepMetrics:
    """The metrics of a run's steps; every rank has one.

    Args:
        config: with what was left to the machine filled in.
    """

    def __init__(self, config: RunConfig, grid: RankGrid) -> None:
        # Within documents the number of attention scores depends on lengths that are not counted: take the least, each
        # token with itself, so that the metrics never claim more than was computed.
        shortest = 1 if config.data.reset_attention_mask else None
        self._flops_per_token = training_flops_per_token(config.model, shortest)
        self._peak_flops_per_second = _peak_flops_per_second(config, grid)
        self._norm_interval = config.logging.norm_interval
        self._update_rule = config.optimizer.rule
        self._has_z_loss = config.training.z_loss_coefficient > 0
        self._grid = grid
        batch_tokens = config.training.global_batch_size * config.model.seq_length
        self._maskable_labels = batch_tokens if config.data.mask_repeated_ngrams else None

    def of_step(
        self, result: StepResult, *, seconds: float, learning_rate: float, consumed_tokens: int
    ) -> dict[str, Any]:
        """Return the metrics of every step, from what it showed and how long it took."""
        tokens_per_second = result.tokens / seconds
        flops_per_second = tokens_per_second * self._flops_per_token
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
            "tokens": consumed_tokens,
            "step_seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "model_flops_per_second": flops_per_second,
        }
        if self._has_z_loss:
            metrics["z_loss"] = result.z_loss
        if self._maskable_labels is not None:
            metrics["masked_share"] = 1 - result.tokens / self._maskable_labels
        if self._peak_flops_per_second is not None:
            metrics["model_flops_utilization"] = flops_per_second / self._peak_flops_per_second
        return metrics

    def are_weights_due(self, step: int) -> bool:
        """Return whether a step's metrics have those of the weights."""
        return self._norm_interval is not None and step % self._norm_interval == 0

    def of_weights_if_due(self, step: int, optimizer: Any) -> dict[str, float]:
        """Norms of the weights and of the step's update, and the ranks' memory, where they are due; collective calls.

        Args:
            optimizer: after the step.
        """
        if not self.are_weights_due(step):
            return {}
        weights, update = weight_and_update_norms(optimizer, self._update_rule)
        return {"params_norm": weights, "update_norm": update, "peak_memory_bytes": self._peak_memory_bytes()}

    def _peak_memory_bytes(self) -> int:
        """Return the most that any rank has held so far: of a GPU what torch had allocated, of a CPU the whole
        process.
        """
        if self._grid.device == "cuda":
            own = torch.cuda.max_memory_allocated()
        else:
            own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        largest = torch.tensor(own, dtype=torch.int64, device=self._grid.torch_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def _peak_flops_per_second(config: RunConfig, grid: RankGrid) -> float | None:
    """Return the peak rate of the run's chips in the format of its products, by the data sheet; None if unknown."""
    if grid.device != "cuda" or (chip := machine_of_device(torch.cuda.get_device_name())) is None:
        return None
    number_format = "fp8" if config.precision.fp8 else config.precision.dtype
    rate: float | None = getattr(chip, f"{number_format}_flops_per_second")
    return None if rate is None else rate * grid.world_size
