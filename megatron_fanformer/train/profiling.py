"""Profiles steps of a run with torch's profiler. Profiled steps compute the same numbers as others.

Each rank in `logging.profile_ranks` writes a Chrome trace and a table of operations to the run's folder `traces`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, record_function

from megatron_fanformer.checkpoint.run_folder import TRACES, checkpoint_name
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.loggers import LoggingConfig

TABLE_ROWS = 100

logger = logging.getLogger(__name__)


class Profiler:
    """Profiles `logging.profile_steps` on this rank, and writes to the run's folder `run`."""

    def __init__(self, config: LoggingConfig, grid: RankGrid, run: Path) -> None:
        self._grid, self._run = grid, run
        steps = config.profile_steps if config.profile_ranks is None or grid.rank in config.profile_ranks else None
        self._first, self._last = steps or (1, 0)  # (1, 0): no steps
        self._profile: profile | None = None

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Profile a training step if it is one of `logging.profile_steps`.

        The profiler stays on from step to step, so it also records the work between two steps. The profile is written
        after the last step to profile.
        """
        if not self._first <= step <= self._last:
            yield
            return
        if self._profile is None:
            self._first = step  # a resumed run may start later than the first step to profile
            self._profile = profile()  # without arguments it records all activities that the device supports
            self._profile.start()
        with record_function(f"step {step}"):
            yield
        if step == self._last:
            self._write(step)

    def close(self, step: int, *, failed: bool) -> None:
        """Write the unfinished profile, whose last step is `step`, if there is one; drop it if the run has failed."""
        if self._profile is not None and not failed:
            self._write(step)
        elif self._profile is not None and self._grid.device == "cpu":  # on a GPU, stopping may wait for ever
            self._profile.stop()

    def _write(self, last: int) -> None:
        """Write the profile of the steps up to `last`; if that fails, warn and let the run go on."""
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        file = self._run / TRACES / f"{checkpoint_name(self._first)}-{last:08d}" / f"rank-{self._grid.rank:05d}.json.gz"
        column = "self_device_time_total" if self._grid.device == "cuda" else "self_cpu_time_total"
        try:
            recorded.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(file))
            table = recorded.key_averages().table(sort_by=column, row_limit=TABLE_ROWS, max_name_column_width=80)
            file.with_name(f"rank-{self._grid.rank:05d}.txt").write_text(table)
            logger.info("profiled steps up to %d, in %s", last, file.parent)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError
            logger.warning("the profile up to step %d cannot be written: %s", last, error)
