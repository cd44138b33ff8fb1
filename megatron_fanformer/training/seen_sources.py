"""What a run has trained on so far: the tokens and epochs of each of its sources."""

import logging
from collections.abc import Collection

import numpy as np

from megatron_fanformer.data.blends import source_labels
from megatron_fanformer.data.datasets import Datasets
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.data.staged_dataset import source_counts
from megatron_fanformer.data.survey import DataSurvey
from megatron_fanformer.runtime.agreement import is_main, on_main
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.preflight import run_stages
from megatron_fanformer.training.samples import consumed_before

logger = logging.getLogger(__name__)


class SeenSources:
    """Counts the samples of each source by the run's order, steps that were skipped left out; none of chats.

    Args:
        data: of the run.
        skipped: the steps so far whose samples were not trained on; it may grow.
    """

    def __init__(self, config: RunConfig, survey: DataSurvey, data: Datasets, skipped: Collection[int]) -> None:
        self._config, self._train, self._skipped = config, data.train, skipped
        if config.data.is_chats:
            self._labels: list[str] = []
            return
        sources = list(dict.fromkeys(source for stage in run_stages(config, survey) for source in stage.blend.sources))
        counts = SampleCounts(survey, config.model.seq_length)
        self._labels = source_labels(sources)
        self._epoch_samples = np.array([counts.epoch_of(source) for source in sources])
        self._step, self._samples = 0, np.zeros(len(sources), np.int64)

    def log_if_stage_begins(self, step: int) -> None:
        """Log that a step is the first one of a stage."""
        for name in (name for name, first in self._config.stage_steps().items() if first == step):
            logger.info("step %d  its samples and those after it are of data.stages, %r", step, name)

    def after(self, step: int) -> dict[str, dict[str, float]]:
        """Return `tokens` and `epochs` of each source by its short name, after a step; a collective call.

        Raises:
            CorruptError: the order of samples cannot be read.
        """
        return on_main(lambda: self._after(step)) if self._labels else {}

    def metrics_if_due(self, step: int, *, is_last: bool) -> dict[str, float]:
        """Return the same as metrics on rank 0, every `logging.source_interval` steps and after the last; else none."""
        interval = self._config.logging.source_interval
        if not self._labels or interval is None or not is_main() or (step % interval and not is_last):
            return {}
        return {f"data/{name}/{what}": n for name, own in self._after(step).items() for what, n in own.items()}

    def _after(self, step: int) -> dict[str, dict[str, float]]:
        self._samples += self._of_steps(self._step + 1, step)
        for skipped in self._skipped:
            if self._step < skipped <= step:
                self._samples -= self._of_steps(skipped, skipped)
        self._step = step
        tokens, epochs = self._samples * self._config.model.seq_length, self._samples / self._epoch_samples
        numbers = zip(self._labels, tokens.tolist(), epochs.tolist(), strict=True)
        return {name: {"tokens": own, "epochs": share} for name, own, share in numbers}

    def _of_steps(self, first: int, last: int) -> np.ndarray:
        begin, end = consumed_before(self._config, first), consumed_before(self._config, last + 1)
        return source_counts(self._train, begin, end, len(self._labels))
