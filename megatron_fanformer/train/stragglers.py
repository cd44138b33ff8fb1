"""Finds the rank whose forward and backward take longer than the others', which then wait for it.

Measured from the start of a step to the moment at which gradients are summed over the replicas, on a GPU by events of
its stream. Ranks of one replica wait for one another on the way, in every layer, so that they take about as long.
"""

import logging
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.parallel import RankGrid

LEAST_STEPS = 4  # that a report is of: the first ones after a start are slow

logger = logging.getLogger(__name__)


class Stragglers:
    """Measures this rank's steps; every rank has one.

    Args:
        stages: this rank's chunks, by `wrap_stages`.
        interval: steps from one report to the next; None: nothing is measured.
        factor: of the median of its stage, beyond which the slowest rank is named in the log.
    """

    def __init__(self, stages: list[Any], grid: RankGrid, *, interval: int | None, factor: float) -> None:
        self._grid, self._factor = grid, factor
        self._interval = interval if grid.world_size > 1 else None
        self._began: Any = None
        self._taken: list[tuple[Any, Any]] = []  # when each step began and had its gradients
        config = stages[0].config
        finalize = config.finalize_model_grads_func

        def noted(*args: Any, **named: Any) -> Any:
            if self._began is not None:  # else it is no training step
                self._taken.append((self._began, self._now()))
            return finalize(*args, **named)

        if self._interval is not None:
            config.finalize_model_grads_func = noted

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = self._now()

    def _now(self) -> Any:
        if self._grid.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def report_if_due(self, step: int) -> dict[str, float]:
        """Return the metrics of the steps since the last report, if one is due; a collective call then."""
        if self._interval is None or step % self._interval:
            return {}
        on_cpu = self._grid.device == "cpu"
        seconds = [end - began if on_cpu else began.elapsed_time(end) / 1000 for began, end in self._taken]
        self._taken.clear()
        if len(seconds) < min(LEAST_STEPS, self._interval):
            return {}
        numbers = torch.empty(self._grid.world_size, dtype=torch.float64, device=self._grid.torch_device)
        dist.all_gather_into_tensor(numbers, numbers.new_tensor([statistics.median(seconds)]))
        times = numbers.tolist()
        of_stage = len(times) // self._grid.groups.pp.size()  # stages have other work than one another
        usual = [statistics.median_low(times[first : first + of_stage]) for first in range(0, len(times), of_stage)]
        factors = [own / max(usual[rank // of_stage], 1e-9) for rank, own in enumerate(times)]
        slowest = max(range(len(times)), key=factors.__getitem__)
        if factors[slowest] > self._factor:
            host = [devices.node_name()]
            dist.broadcast_object_list(host, src=slowest)
            if self._grid.is_main:
                logger.warning(
                    "step %d  rank %d on %s holds up the others: %.4g s of forward and backward, %.3g times the median "
                    "of its stage; see whether that node is healthy (examples/check_nodes.py)",
                    *(step, slowest, host[0], times[slowest], factors[slowest]),
                )
        median = statistics.median(times)
        return {"work_seconds/median": median, "work_seconds/slowest": times[slowest], "slowest_rank": slowest}
