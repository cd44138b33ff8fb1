"""The callbacks of a training step: its metrics, the tokens of each source, slow ranks, and garbage collection.

`Trainer` calls them in the order of its list. `PhaseHealth` (phase_health.py) is a callback, too.
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
SourceTotals = dict[str, dict[str, float]]  # `tokens` and `epochs` of each source so far, by its path
STRAGGLER_FACTOR = 1.4  # the slowest rank is reported if it takes more than this times the median of its stage

logger = logging.getLogger(__name__)


class Callback:
    """Work that accompanies training steps. All ranks make the same calls in the same order: many are collective."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before it is computed or skipped."""

    def around_attempt(self, step: int) -> AbstractContextManager[None]:
        """Return a context for the computation of a step; it is entered anew if the step is computed again."""
        return nullcontext()

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the metrics that are due after a step."""
        return {}


def is_due(step: int, interval: int | None) -> bool:
    """Return whether a step is a multiple of an interval; None means never."""
    return interval is not None and step % interval == 0


class StepMetrics(Callback):
    """Computes the metrics of every step, and at intervals the norm of the weights and the peak memory.

    Args:
        config: the configuration with all fields resolved for this machine.
    """

    def __init__(self, config: RunConfig, grid: RankGrid, optimizer: Any) -> None:
        # With attention within documents, the number of attention scores depends on the documents' lengths, which are
        # not known here. Assume one token per document, so that the metrics never claim more than was computed.
        context_length = 1 if config.data.reset_attention_mask else None
        self._flops_per_token = training_flops_per_token(config.model, context_length)
        self._peak_flops_per_second = peak_flops_per_second(config, grid)
        self._config, self._grid, self._optimizer = config, grid, optimizer

    def compute(
        self, result: StepResult, *, seconds: float, learning_rate: float, consumed_tokens: int
    ) -> dict[str, Any]:
        """Return the metrics of a step that has updated the weights."""
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
        """Return the norm of the weights and the largest peak memory of all ranks, every `norm_interval` steps."""
        if is_skipped or not is_due(step, self._config.logging.norm_interval):
            return {}
        if self._grid.device == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
        else:
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # ru_maxrss is in KiB
        largest = torch.tensor(peak_bytes, dtype=torch.int64, device=self._grid.torch_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {"params_norm": weight_norm(self._optimizer), "peak_memory_bytes": int(largest)}


def peak_flops_per_second(config: RunConfig, grid: RankGrid) -> float | None:
    """Return the peak FLOP/s of all chips of the run in the run's number format, by the data sheet; None if unknown."""
    if grid.device != "cuda" or (chip := machine_of_device(torch.cuda.get_device_name())) is None:
        return None
    number_format = "fp8" if config.precision.fp8 else config.precision.dtype
    rate: float | None = getattr(chip, f"{number_format}_flops_per_second")
    return None if rate is None else rate * grid.world_size


class Stragglers(Callback):
    """Finds the rank with the longest forward and backward passes: all others wait for it.

    The time runs from the start of a step until the gradients are summed over the replicas; a GPU is timed by events of
    its stream. Ranks of one replica wait for each other in every layer, so their times are about equal.

    Args:
        stages: the result of `wrap_stages`.
        interval: steps between reports; None: measure nothing.
    """

    def __init__(self, stages: list[Any], grid: RankGrid, *, interval: int | None) -> None:
        self._grid = grid
        self._interval = interval if grid.world_size > 1 else None
        self._began: Any = None  # the start of the current step, from `_now`
        self._spans: list[tuple[Any, Any]] = []  # the start and the end of each step's computation
        config = stages[0].config
        finalize = config.finalize_model_grads_func

        def note_time_and_finalize(*args: Any, **named: Any) -> Any:
            self._spans.append((self._began, self._now()))
            return finalize(*args, **named)

        if self._interval is not None:
            config.finalize_model_grads_func = note_time_and_finalize

    def begin_step(self, step: int) -> None:
        """Note the time at which a step begins."""
        self._began = self._now()

    def _now(self) -> Any:
        """Return the time in seconds on a CPU, a recorded event on a GPU."""
        if self._grid.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """If a report is due, return the median and the slowest of the ranks' times, and warn of a straggler.

        The time of a rank is the median over its steps since the last report.
        """
        if not is_due(step, self._interval):
            return {}
        on_cpu = self._grid.device == "cpu"
        seconds = [end - began if on_cpu else began.elapsed_time(end) / 1000 for began, end in self._spans]  # GPU: ms
        self._spans.clear()
        gathered = torch.empty(self._grid.world_size, dtype=torch.float64, device=self._grid.torch_device)
        dist.all_gather_into_tensor(gathered, gathered.new_tensor([statistics.median(seconds or [0.0])]))
        times = gathered.tolist()
        # Stages differ in their work, so a rank is compared with the ranks of its own stage, which are consecutive.
        # In a stage of two ranks, the low median is the time of the faster one.
        per_stage = len(times) // self._grid.groups.pp.size()
        medians = [statistics.median_low(times[first : first + per_stage]) for first in range(0, len(times), per_stage)]
        factors = [taken / max(medians[rank // per_stage], 1e-9) for rank, taken in enumerate(times)]
        slowest = max(range(len(times)), key=factors.__getitem__)
        if factors[slowest] > STRAGGLER_FACTOR and self._grid.is_main:
            logger.warning(
                "step %d  rank %d holds up the others: %.4g s of forward and backward, %.3g times the median of its "
                "stage; see whether its node is healthy (examples/check_nodes.py)",
                *(step, slowest, times[slowest], factors[slowest]),
            )
        return {
            "work_seconds/median": statistics.median(times),
            "work_seconds/slowest": times[slowest],
            "slowest_rank": slowest,
        }


class SourceCounter(Callback):
    """Counts the tokens and epochs of each source that the run was trained on, except in fine-tuning on chats.

    The counts follow from the order of samples. Samples of skipped steps do not count.

    Args:
        skipped_steps: the steps so far that were skipped; the caller may add more later.
        step: the last step that the run has taken.
        totals: the result of `totals_after` for that step; None: unknown, so all steps from 1 are counted.
    """

    def __init__(
        self,
        config: RunConfig,
        data: CheckedData,
        datasets: Datasets,
        skipped_steps: Collection[int],
        *,
        step: int = 0,
        totals: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self._config, self._train, self._skipped_steps = config, datasets.train, skipped_steps
        self._names: list[str] = []
        self._stage_starts = {first: name for name, first in config.mix_steps().items()}
        if config.data.is_chats:
            return
        counts = SampleCounts(data, config.model.seq_length)
        epoch_samples: dict[Source, float] = {}  # the samples in one epoch of each source
        for mix in run_mixes(config, data):
            in_mix = counts.epoch_samples(config.data, mix.blend)
            epoch_samples |= dict(zip(mix.blend.sources, in_mix, strict=True))
        self._names = [redacted(source.name) for source in epoch_samples]
        number_of = {name: number for number, name in enumerate(self._names)}
        # Without stages, a source that the blend names twice is two sources of the dataset, which have one name here.
        dataset_sources = epoch_samples if config.data.stages else data.train.sources
        self._name_numbers = [number_of[redacted(source.name)] for source in dataset_sources]  # indices of `_names`
        self._labels = source_labels(list(epoch_samples))
        self._epoch_samples = np.array(list(epoch_samples.values()))
        self._step = 0 if totals is None else step
        known = totals or {}
        tokens = [known.get(name, {}).get("tokens", 0) for name in self._names]
        self._samples = np.array(tokens, np.int64) // config.model.seq_length
        self._former = {name: dict(total) for name, total in known.items() if name not in number_of}  # no longer named

    def begin_step(self, step: int) -> None:
        """Log the name of the stage that begins with this step, if one does."""
        if step in self._stage_starts:
            logger.info(
                "step %d  its samples and those after it are of data.stages, %r", step, self._stage_starts[step]
            )

    def totals_after(self, step: int) -> SourceTotals:
        """Return the totals of each source after a step, sources of earlier configurations included; collective.

        Raises:
            CorruptError: the order of samples cannot be read.
        """
        return on_main(lambda: {**self._present_totals(step), **self._former}) if self._names else {}

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return the totals as metrics on rank 0, every `logging.norm_interval` steps and after the last step."""
        interval, is_last = self._config.logging.norm_interval, step >= self._config.training.steps
        if self._names and interval is not None and is_main() and (is_last or is_due(step, interval)):
            by_label = zip(self._labels, self._present_totals(step).values(), strict=True)
            return {f"data/{label}/{unit}": total for label, totals in by_label for unit, total in totals.items()}
        return {}

    def _present_totals(self, step: int) -> SourceTotals:
        """Count the samples up to a step, and return the totals of the sources in this configuration."""
        self._samples += self._count_samples(self._step + 1, step)
        for skipped in self._skipped_steps:
            if self._step < skipped <= step:
                self._samples -= self._count_samples(skipped, skipped)
        self._step = step
        tokens, epochs = self._samples * self._config.model.seq_length, self._samples / self._epoch_samples
        totals = zip(self._names, tokens.tolist(), epochs.tolist(), strict=True)
        return {name: {"tokens": token_total, "epochs": epoch_total} for name, token_total, epoch_total in totals}

    def _count_samples(self, first: int, last: int) -> np.ndarray:
        """Return the number of samples under each of `_names` in the steps from `first` to `last`, [names] int64."""
        begin, end = consumed_before(self._config, first), consumed_before(self._config, last + 1)
        counts = source_counts(self._train, begin, end, len(self._name_numbers))  # two sources may have one name
        return np.bincount(self._name_numbers, weights=counts, minlength=len(self._names)).astype(np.int64)


class GarbageCollection(Callback):
    """Collects Python's garbage on all ranks at once, and gives freed memory back to the system."""

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Collect garbage every `GARBAGE_INTERVAL` steps."""
        if is_due(step, GARBAGE_INTERVAL):
            gc.collect()
            devices.return_freed_memory()
        return {}
