"""The callbacks of a training step: metrics of steps, weights and sources, the search for a slow rank, garbage.

`Trainer.take_step` calls them in the order of its list; `PhaseHealth` is another one.
"""

import gc
import logging
import resource
import statistics
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fanformer.data.blends import Source, source_labels
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.datasets import Datasets
from megatron_fanformer.data.mixes import source_counts
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.errors import redacted
from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.plan.machines import machine_of_device
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.agreement import is_main, on_main
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.optimizer import weight_norm
from megatron_fanformer.train.preflight import run_mixes
from megatron_fanformer.train.samples import consumed_before
from megatron_fanformer.train.step import StepResult

GARBAGE_INTERVAL = 100  # steps
Seen = dict[str, dict[str, float]]  # `tokens` and `epochs` of each source, by its path
STRAGGLER_FACTOR = 1.4  # of the median of its stage, beyond which the slowest rank is named

logger = logging.getLogger(__name__)


class Callback:
    """Work around training steps; every rank has one, and all make the same calls, of which many are collective."""

    def begin_step(self, step: int) -> None:
        """Do the work that is due before a step is computed or skipped."""

    def around_attempt(self, step: int) -> AbstractContextManager[None]:
        """Return the context in which a step is computed, each time that it is."""
        return nullcontext()

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the metrics that are due after a step."""
        return {}


def is_due(step: int, interval: int | None) -> bool:
    """Return whether a step is a multiple of an interval; None: never."""
    return interval is not None and step % interval == 0


class StepMetrics(Callback):
    """The metrics of every step, and at intervals those that read every weight.

    Args:
        config: with the fields filled in that were left to the machine.
    """

    def __init__(self, config: RunConfig, grid: RankGrid, optimizer: Any) -> None:
        # Within documents the number of attention scores depends on lengths that are not counted: take the least, each
        # token with itself, so that the metrics never claim more than was computed.
        shortest = 1 if config.data.reset_attention_mask else None
        self._flops_per_token = training_flops_per_token(config.model, shortest)
        self._peak_flops_per_second = peak_flops_per_second(config, grid)
        self._config, self._grid, self._optimizer = config, grid, optimizer

    def of_step(
        self, result: StepResult, *, seconds: float, learning_rate: float, consumed_tokens: int
    ) -> dict[str, Any]:
        """Return the metrics of a step that was taken."""
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
        if self._config.training.z_loss_coefficient > 0:
            metrics["z_loss"] = result.z_loss
        if self._peak_flops_per_second is not None:
            metrics["model_flops_utilization"] = flops_per_second / self._peak_flops_per_second
        return metrics

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the norm of the weights, and the most memory that any rank has held so far."""
        if is_skipped or not is_due(step, self._config.logging.norm_interval):
            return {}
        if self._grid.device == "cuda":
            held = torch.cuda.max_memory_allocated()
        else:
            held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        largest = torch.tensor(held, dtype=torch.int64, device=self._grid.torch_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {"params_norm": weight_norm(self._optimizer), "peak_memory_bytes": int(largest)}


def peak_flops_per_second(config: RunConfig, grid: RankGrid) -> float | None:
    """Return the peak rate of the run's chips in the format of its products, by the data sheet; None if unknown."""
    if grid.device != "cuda" or (chip := machine_of_device(torch.cuda.get_device_name())) is None:
        return None
    number_format = "fp8" if config.precision.fp8 else config.precision.dtype
    rate: float | None = getattr(chip, f"{number_format}_flops_per_second")
    return None if rate is None else rate * grid.world_size


class Stragglers(Callback):
    """Finds the rank whose forward and backward take longest: the others wait for it.

    Measured from the start of a step to the moment at which gradients are summed over the replicas, on a GPU by events
    of its stream. Ranks of one replica wait for one another in every layer, so that they take about as long.

    Args:
        stages: this rank's chunks, by `wrap_stages`.
        interval: steps from one report to the next; None: nothing is measured.
    """

    def __init__(self, stages: list[Any], grid: RankGrid, *, interval: int | None) -> None:
        self._grid = grid
        self._interval = interval if grid.world_size > 1 else None
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []  # when each step began and had its gradients
        config = stages[0].config
        finalize = config.finalize_model_grads_func

        def finalize_and_note(*args: Any, **named: Any) -> Any:
            self._spans.append((self._began, self._now()))
            return finalize(*args, **named)

        if self._interval is not None:
            config.finalize_model_grads_func = finalize_and_note

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        self._began = self._now()

    def _now(self) -> Any:
        if self._grid.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the times of the steps since the last report, if one is due."""
        if self._interval is None or step % self._interval:
            return {}
        on_cpu = self._grid.device == "cpu"
        seconds = [end - began if on_cpu else began.elapsed_time(end) / 1000 for began, end in self._spans]
        self._spans.clear()
        numbers = torch.empty(self._grid.world_size, dtype=torch.float64, device=self._grid.torch_device)
        dist.all_gather_into_tensor(numbers, numbers.new_tensor([statistics.median(seconds or [0.0])]))
        times = numbers.tolist()
        of_stage = len(times) // self._grid.groups.pp.size()  # stages have other work than one another
        usual = [statistics.median_low(times[first : first + of_stage]) for first in range(0, len(times), of_stage)]
        factors = [seconds / max(usual[rank // of_stage], 1e-9) for rank, seconds in enumerate(times)]
        slowest = max(range(len(times)), key=factors.__getitem__)
        if factors[slowest] > STRAGGLER_FACTOR and self._grid.is_main:
            logger.warning(
                "step %d  rank %d holds up the others: %.4g s of forward and backward, %.3g times the median of its "
                "stage; see whether its node is healthy (examples/check_nodes.py)",
                *(step, slowest, times[slowest], factors[slowest]),
            )
        median = statistics.median(times)
        return {"work_seconds/median": median, "work_seconds/slowest": times[slowest], "slowest_rank": slowest}


class SeenSources(Callback):
    """Counts the samples of each source by the run's order, steps that were skipped left out; none of chats.

    Args:
        data: of the run.
        skipped: the steps so far whose samples were not trained on; it may grow.
        step: the run's present one.
        seen: the result of `after` at that step; None: unknown.
    """

    def __init__(
        self,
        config: RunConfig,
        data: CheckedData,
        datasets: Datasets,
        skipped: Collection[int],
        *,
        step: int = 0,
        seen: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self._config, self._train, self._skipped = config, datasets.train, skipped
        self._names: list[str] = []
        self._begins = {step: name for name, step in config.mix_steps().items()}
        if config.data.is_chats:
            return
        counts = SampleCounts(data, config.model.seq_length)
        epochs: dict[Source, float] = {}
        # A mix of a run without stages may name a source twice, each of which draws from its beginning on.
        twice = [] if config.data.stages else data.train.sources
        drawn = [redacted(source.name) for source in twice]
        for mix in run_mixes(config, data):
            epoch_samples = counts.epoch_samples(config.data, mix.blend)
            epochs |= dict(zip(mix.blend.sources, epoch_samples, strict=True))
        self._names = [redacted(source.name) for source in epochs]
        numbers = {name: number for number, name in enumerate(self._names)}
        self._drawn = [numbers[name] for name in drawn or self._names]
        self._labels = source_labels(list(epochs))
        self._epoch_samples = np.array(list(epochs.values()))
        self._step, known = (0, {}) if seen is None else (step, seen)
        tokens = [known.get(name, {}).get("tokens", 0) for name in self._names]
        self._samples = np.array(tokens, np.int64) // config.model.seq_length
        self._former = {name: dict(counted) for name, counted in known.items() if name not in numbers}

    def begin_step(self, step: int) -> None:
        """Log that a step is the first one of a stage."""
        if step in self._begins:
            logger.info("step %d  its samples and those after it are of data.stages, %r", step, self._begins[step])

    def after(self, step: int) -> Seen:
        """Return tokens and epochs of each source after a step; a collective call.

        Raises:
            CorruptError: the order of samples cannot be read.
        """
        return on_main(lambda: {**self._after(step), **self._former}) if self._names else {}

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the same as metrics on rank 0, every `logging.norm_interval` steps and after the last; else none."""
        interval, is_last = self._config.logging.norm_interval, step >= self._config.training.steps
        if not self._names or interval is None or not is_main() or (step % interval and not is_last):
            return {}
        numbers = zip(self._labels, self._after(step).values(), strict=True)
        return {f"data/{label}/{what}": number for label, seen in numbers for what, number in seen.items()}

    def _after(self, step: int) -> Seen:
        self._samples += self._of_steps(self._step + 1, step)
        for skipped in self._skipped:
            if self._step < skipped <= step:
                self._samples -= self._of_steps(skipped, skipped)
        self._step = step
        tokens, epochs = self._samples * self._config.model.seq_length, self._samples / self._epoch_samples
        numbers = zip(self._names, tokens.tolist(), epochs.tolist(), strict=True)
        return {name: {"tokens": seen, "epochs": share} for name, seen, share in numbers}

    def _of_steps(self, first: int, last: int) -> np.ndarray:
        begin, end = consumed_before(self._config, first), consumed_before(self._config, last + 1)
        counts = source_counts(self._train, begin, end, len(self._drawn))
        return np.bincount(self._drawn, counts, minlength=len(self._names)).astype(np.int64)


class Garbage(Callback):
    """Collects Python's garbage on all ranks at once, and gives freed memory back to the system."""

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Collect, where it is due."""
        if step % GARBAGE_INTERVAL == 0:
            gc.collect()
            devices.return_freed_memory()
        return {}
