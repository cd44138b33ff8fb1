"""The fastest layouts that fit, of those that a user names or of all; and why the others are not among them."""

import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.plan.candidates import DEGREES, NOT_RECOMPUTED, all_layouts, layout_name
from megatron_fanformer.plan.estimate import Estimate, estimate, job_of, problems, problems_of_layout
from megatron_fanformer.plan.machines import Machine
from megatron_fanformer.plan.step_time import StepTime, step_time
from megatron_fanformer.train.config import RunConfig

MOST_SHOWN = 10
BOUNDING = (*DEGREES, "pipeline_model_parallel_layout", "ddp_bucket_size")  # all that changes a step, but recomputation
NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:, ?\d+(?:\.\d+)?)*")  # also several, with commas between


@dataclass(frozen=True, kw_only=True)
class RejectedClass:
    """Layouts that one rule rejects. (A layout that breaks several is in as many classes.)"""

    rule: str
    """Their common message, with N for the numbers."""
    count: int
    example: str
    """The name of one of them, as `--layouts` reads it; of those that do not fit, the one that needs least."""
    message: str
    """The example's message, also by `train`: the values, the rule, and the nearest legal value."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The layouts that a search has judged."""

    candidates: tuple[Estimate, ...]
    """The candidates: those that fit first, then by speed; of a search the ten fastest that fit, or the one that lacks
    least."""
    judged: int
    """Number of layouts judged."""
    legal: int
    """Number of layouts that break no rule."""
    rejected: tuple[RejectedClass, ...]
    """Rejected classes, the largest first. A search counts a layout that does not fit only if it would be faster than
    the last candidate."""

    @property
    def best(self) -> Estimate | None:
        """Return the fastest that fits."""
        return next((each for each in self.candidates if each.fits), None)


def judge(named: Sequence[tuple[str, RunConfig]], gpus: int, machine: Machine) -> Findings:
    """Layouts that a user names, each with the configuration that is laid out so."""
    rejections, estimates = _Rejections(named[0][1]), list[Estimate]()
    for name, config in named:
        if found := problems(config, gpus):
            rejections.add(found, name)
        else:
            estimates.append(estimate(name, config, job_of(config, gpus), machine))
    for estimated in sorted(estimates, key=lambda estimated: estimated.needed_bytes):
        if not estimated.fits:
            rejections.add([estimated.shortage], estimated.name)
    return Findings(
        candidates=tuple(sorted(estimates, key=lambda estimated: (not estimated.fits, estimated.time.seconds))),
        judged=len(named),
        legal=len(estimates),
        rejected=rejections.classes(),
    )


def search(config: RunConfig, gpus: int, machine: Machine) -> Findings:
    """Search all layouts of a configuration on that many GPUs.

    Layouts are taken in the order of a lower bound of their time, which those share that differ in recomputation alone.
    So few need their own time and memory computed before the fastest that fit are known.
    """
    rejections = _Rejections(config)
    legal = list(_legal(config, gpus, rejections))
    # A layout's time or a lower bound of it, its number, and its time where it is known.
    waiting: list[tuple[float, int, StepTime | None]] = [
        (seconds, number, None) for number, seconds in enumerate(_bounds(legal, gpus, machine))
    ]
    heapq.heapify(waiting)
    fitting: list[Estimate] = []
    least: Estimate | None = None
    too_large = 0
    while waiting and len(fitting) < MOST_SHOWN:
        _, number, time = heapq.heappop(waiting)
        job = job_of(legal[number], gpus)
        if time is None:
            time = step_time(job, machine)
            heapq.heappush(waiting, (time.seconds, number, time))
            continue
        estimated = estimate(layout_name(legal[number], config), legal[number], job, machine, time)
        if estimated.fits:
            fitting.append(estimated)
            continue
        too_large += 1
        if least is None or estimated.needed_bytes < least.needed_bytes:
            least = estimated
    if least:
        rejections.add([least.shortage], least.name, count=too_large)
    return Findings(
        candidates=tuple(fitting or filter(None, [least])),
        judged=rejections.layouts + len(legal),
        legal=len(legal),
        rejected=rejections.classes(),
    )


def _legal(config: RunConfig, gpus: int, rejections: "_Rejections") -> Iterator[RunConfig]:
    """Yield the layouts that break no rule; the others are added to `rejections`."""
    for micro_batches in all_layouts(config, gpus):
        parallel = micro_batches[0].parallel
        of_layout = [*parallel.problems(), *problems_of_layout(micro_batches[0])]
        for laid_out in micro_batches:
            if broken := of_layout + laid_out.problems_of_steps(parallel.data_parallel_size or 1):
                rejections.layouts += 1
                rejections.add(broken, laid_out)
            else:
                yield laid_out


def _bounds(legal: Iterable[RunConfig], gpus: int, machine: Machine) -> Iterator[float]:
    """Yield the least that a step of each can take, in seconds: recomputing nothing."""
    known: dict[tuple[Any, ...], float] = {}
    for config in legal:
        parallel = config.parallel
        key = (*(getattr(parallel, name) for name in BOUNDING), config.training.micro_batch_size)
        if key not in known:
            plain = dataclasses.replace(config, parallel=dataclasses.replace(parallel, **NOT_RECOMPUTED))
            known[key] = step_time(job_of(plain, gpus), machine).seconds
        yield known[key]


class _Rejections:
    """Rejected layouts by rule, with the first example of each."""

    def __init__(self, base: RunConfig) -> None:
        self.base, self.layouts = base, 0
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[str, RunConfig | str]] = {}

    def add(self, messages: list[str], example: RunConfig | str, *, count: int = 1) -> None:
        """Add layouts that these problems reject."""
        for message in messages:
            rule = NUMBERS.sub("N", message)
            self._counts[rule] = self._counts.get(rule, 0) + count
            self._first.setdefault(rule, (message, example))

    def classes(self) -> tuple[RejectedClass, ...]:
        """Return them, the largest first."""
        classes = []
        for rule, count in sorted(self._counts.items(), key=lambda item: -item[1]):
            message, example = self._first[rule]
            name = example if isinstance(example, str) else layout_name(example, self.base)
            classes.append(RejectedClass(rule=rule, count=count, example=name, message=message))
        return tuple(classes)
