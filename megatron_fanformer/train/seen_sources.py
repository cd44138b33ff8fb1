"""What a run has trained on so far: the tokens and epochs of each of its sources."""

import logging
from collections.abc import Collection, Mapping

import numpy as np

from megatron_fanformer.data.blends import Source, source_labels
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.datasets import Datasets
from megatron_fanformer.data.mixes import source_counts
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.errors import redacted
from megatron_fanformer.runtime.agreement import is_main, on_main
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.preflight import run_mixes
from megatron_fanformer.train.samples import consumed_before

logger = logging.getLogger(__name__)

Seen = dict[str, dict[str, float]]
"""`tokens` and `epochs` of each source, by its path."""


class SeenSources:
    """Counts the samples of each source by the run's order, steps that were skipped left out; none of chats.

    Args:
        data: of the run.
        skipped: the steps so far whose samples were not trained on; it may grow.
        step: that the run is at.
        seen: the result of `after` at that step; None: unknown.
        is_changed: whether the order is not that of all steps so far, as the data were changed on the way. Otherwise,
            sources that `seen` lacks are counted from the first step on: the same data may have other names now.
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
        is_changed: bool = False,
    ) -> None:
        self._config, self._train, self._skipped = config, datasets.train, skipped
        self._names: list[str] = []
        self._begins = {step: name for name, step in config.stage_steps().items()}
        if config.data.is_chats:
            return
        counts = SampleCounts(data, config.model.seq_length)
        epochs: dict[Source, float] = {}
        # A mix of a run without stages may name a source twice, each of which draws from its beginning on.
        twice = [] if config.data.stages else data.train.sources
        drawn = [redacted(data.stated(source).name) for source in twice]
        for mix in run_mixes(config, data):
            epoch_samples = counts.epoch_samples(config.data, mix.blend)
            epochs |= dict(zip(mix.blend.sources, epoch_samples, strict=True))
        stated = [data.stated(source) for source in epochs]
        self._names = [redacted(source.name) for source in stated]
        numbers = {name: number for number, name in enumerate(self._names)}
        self._drawn = [numbers[name] for name in drawn or self._names]
        self._labels = source_labels(stated)
        self._epoch_samples = np.array(list(epochs.values()))
        is_known = is_changed or (seen is not None and seen.keys() <= numbers.keys())
        self._step, known = (step, seen or {}) if is_known else (0, {})
        tokens = [known.get(name, {}).get("tokens", 0) for name in self._names]
        self._samples = np.array(tokens, np.int64) // config.model.seq_length
        self._former = {name: dict(counted) for name, counted in known.items() if name not in numbers}

    def log_if_stage_begins(self, step: int) -> None:
        """Log that a step is the first one of a stage."""
        if step in self._begins:
            logger.info("step %d  its samples and those after it are of data.stages, %r", step, self._begins[step])

    def after(self, step: int) -> Seen:
        """Return tokens and epochs of each source after a step; a collective call.

        Raises:
            CorruptError: the order of samples cannot be read.
        """
        return on_main(lambda: {**self._after(step), **self._former}) if self._names else {}

    def metrics_if_due(self, step: int, *, is_last: bool) -> dict[str, float]:
        """Return the same as metrics on rank 0, every `logging.source_interval` steps and after the last; else none."""
        interval = self._config.logging.source_interval
        if not self._names or interval is None or not is_main() or (step % interval and not is_last):
            return {}
        numbers = zip(self._labels, self._after(step).values(), strict=True)
        return {f"data/{label}/{what}": number for label, seen in numbers for what, number in seen.items()}

    def _after(self, step: int) -> Seen:
        """Return it of the present sources."""
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
