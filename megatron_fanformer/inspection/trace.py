"""Where the time of profiled steps went: the trace of a rank, its time by category, and the gaps between kernels.

On a CPU, time is that of the thread that takes the steps: each moment is the innermost operation's, in the category of
it and of what it is part of. On a GPU, time is that of the device: each moment is the kernels' that are running, in
equal parts where several compute at once; communication counts where nothing else runs (it is *exposed*), and a moment
without any kernel is the host's. So the categories add up to the steps, from the first one's start to the last one's
end.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from isal import igzip
from isal.igzip_lib import IsalError

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.training.traces import PHASE, STEP, WAIT

COMMUNICATION, OPTIMIZER, LOADING = "communication", "optimizer", "loading samples"
OTHER, HOST, BETWEEN = "other operations", "host", "between steps"

# In this order: the first whose pattern an operation, a kernel of it or anything around it matches. GEMMs of attention
# are attention; those of the loss head are matrix products, those of Muon the optimizer's.
PATTERNS = {
    COMMUNICATION: rf"c10d::|gloo:|nccl|^{WAIT}$",
    OPTIMIZER: rf"^{PHASE}(update|gradient norm)$|Optimizer\.step|multi_tensor|fused_adam",
    "attention": r"scaled_dot_product|causal_attention|flash|fmha|FusedAttn|cudnn.*sdpa",
    "matrix products": r"aten::(add|b|badd)?mm_?$|(mkl|add)_product|mkldnn_linear|gemm|nvjet|cutlass|onednn",
    "FAN activation": r"FANActivation|_fan_(activate|differentiate)",
    "loss head": r"LossHeadFunction|CrossEntropy|log_softmax|^_exponentials",
    "norms": r"rms_?norm|RMSNorm",
    "SwiGLU": r"swiglu|SwiGLU|silu",
    "rotary embedding": r"rope|rotary|RoPE|_Rotation",
    LOADING: rf"DataLoader|^{PHASE}(loading|sharing|waiting for) samples$",
}
CATEGORIES = (*PATTERNS, OTHER, HOST, BETWEEN)
"""What a moment may be, in the order of the table."""
_NONE = len(PATTERNS)  # the number of the category of a name that matches no pattern
BACKGROUND = "gloo:"  # what goes on beside the thread that began it, under whose number torch files some of it
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
OPERATIONS = ("cpu_op", "user_annotation", *LAUNCHES)
NAMED_GAPS = 8
MOST_BYTES = 2 << 30
READ_BYTES = 1 << 22
# What a file raises that is no gzip, or not whole, and a text that is no trace.
DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    zlib.error,
    IsalError,  # type: ignore[assignment]  # its stub
    msgspec.DecodeError,
    RecursionError,
)


class _Arguments(msgspec.Struct):
    correlation: int | None = None


class Event(msgspec.Struct):
    """An event of a trace, as torch writes it for Chrome's viewer."""

    ph: str
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    """Its start, in microseconds."""
    dur: float = 0.0
    """Microseconds."""
    args: _Arguments | None = None

    @property
    def end(self) -> float:
        """Its end, in microseconds."""
        return self.ts + self.dur


class _Trace(msgspec.Struct):
    traceEvents: list[Event]  # the format's name


class Interval(NamedTuple):
    """A time in microseconds, and what it is for."""

    start: float
    end: float
    category: str


class Gap(NamedTuple):
    """The times in which a GPU has no kernel, between kernels of two categories."""

    after: str
    before: str
    seconds: float
    """Of a step."""
    times: float
    """In a step."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Where the time of a rank's profiled steps went."""

    steps: tuple[int, ...]
    on_gpu: bool
    seconds: dict[str, float]
    """Of a step, by category, in the order of CATEGORIES; together the whole time. Communication is the exposed one."""
    communication: float
    """Seconds of a step in which any communication went on, beside computation or not."""
    idle: float
    """Seconds of a step in which a GPU runs no kernel, or on a CPU the thread no operation."""
    gaps: list[Gap]
    """The largest ones; on a CPU between operations."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def rank_times(file: Path) -> RankTimes:
    """Return where the time went by a rank's trace.

    Raises:
        InputError: it is not the trace of steps, or is too large.
        CorruptError: it cannot be read.
    """
    try:
        return times_of(read_events(file))
    except LookupError:
        raise InputError(f"{file} has no step of a run; name a trace that a run's profiler wrote") from None


def read_events(file: Path) -> list[Event]:
    """Return the events of a trace that last.

    Raises:
        InputError: it is too large.
        CorruptError: it cannot be read.
    """
    content = bytearray()
    try:
        with igzip.open(regular_file(file), "rb") as stream:
            while piece := stream.read(READ_BYTES):
                content += piece
                if len(content) > MOST_BYTES:
                    raise InputError(
                        f"{file} holds more than {MOST_BYTES >> 30} GiB, too much to read at once; profile fewer steps"
                    )
        events = msgspec.json.decode(content, type=_Trace).traceEvents
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptError(f"{file} is not a whole trace ({reason}); profile the steps again") from None
    return [event for event in events if event.ph == "X" and event.dur >= 0]


def times_of(events: list[Event]) -> RankTimes:
    """Return where the time went by a trace's events.

    Raises:
        LookupError: none of them is a step.
    """
    steps = sorted(filter(_is_step, events), key=lambda event: event.ts)
    if not steps or steps[-1].end <= steps[0].ts:
        raise LookupError
    main, start, end = steps[0].tid, steps[0].ts, steps[-1].end
    kernels = [event for event in events if event.cat in KERNELS]
    launchers: dict[int, int] = {}
    threads: dict[int | str, list[Event]] = {}
    for event in events:
        if event.cat in OPERATIONS and not event.name.startswith(BACKGROUND):
            threads.setdefault(event.tid, []).append(event)
    for thread, operations in threads.items():
        if thread != main:
            list(_moments(operations, start, end, launchers))  # for what they launch
    end = max([end, *(kernel.end for kernel in kernels)])
    moments = list(_moments(threads[main], start, end, launchers))
    seconds: dict[str, float] = defaultdict(float)
    if kernels:
        busy = [_of_kernel(kernel, launchers) for kernel in kernels if kernel.end > start]
        together, idle = _divide(busy, moments, start, end, seconds)
    else:
        for moment in moments:
            seconds[moment.category] += moment.end - moment.start
        busy = [moment for moment in moments if moment.category not in (HOST, BETWEEN)]
        idle = seconds[HOST] + seconds[BETWEEN]
        together = _covered((event for event in events if _number(event.name) == 0), start, end)
    microseconds = 1e6 * len(steps)
    return RankTimes(
        steps=tuple(int(step.name.removeprefix(STEP)) for step in steps),
        on_gpu=bool(kernels),
        seconds={name: seconds[name] / microseconds for name in CATEGORIES if seconds[name]},
        communication=together / microseconds,
        idle=idle / microseconds,
        gaps=_gaps(busy, microseconds),
    )


class _Open(NamedTuple):
    """An operation that has not ended, and what it is part of."""

    end: float
    number: int
    """Of the category: the first of its own and of those around it."""
    in_step: bool
    is_range: bool
    """Whether it only names what is within it."""

    @property
    def category(self) -> str:
        """What a moment is in which it is the innermost."""
        if not self.in_step:
            return BETWEEN
        found = OTHER if self.number == _NONE else CATEGORIES[self.number]
        return HOST if self.is_range and found != LOADING else found


def _moments(operations: list[Event], start: float, end: float, launchers: dict[int, int]) -> Iterator[Interval]:
    """Yield what a thread does from one time to another, without gaps.

    Args:
        launchers: filled with the number of the category in which each kernel was launched, by its correlation.
    """
    open_ones = [_Open(float("inf"), _NONE, in_step=False, is_range=True)]
    reached = start

    def until(time: float) -> Iterator[Interval]:
        nonlocal reached
        if min(time, end) > reached:
            yield Interval(reached, min(time, end), open_ones[-1].category)
            reached = min(time, end)

    for event in sorted(operations, key=lambda event: (event.ts, -event.dur)):
        while open_ones[-1].end <= event.ts:
            yield from until(open_ones[-1].end)
            open_ones.pop()
        yield from until(event.ts)
        around = open_ones[-1]
        number = min(around.number, _number(event.name))
        is_step = _is_step(event)
        is_range = is_step or event.name.startswith(PHASE)
        # Times are rounded: what is within another operation may seem to end a little later.
        open_ones.append(_Open(min(event.end, around.end), number, around.in_step or is_step, is_range))
        if event.cat in LAUNCHES and event.args is not None and event.args.correlation is not None:
            launchers[event.args.correlation] = number
    while len(open_ones) > 1:
        yield from until(open_ones[-1].end)
        open_ones.pop()
    yield from until(end)


def _of_kernel(kernel: Event, launchers: dict[int, int]) -> Interval:
    correlation = None if kernel.args is None else kernel.args.correlation
    number = min(_number(kernel.name), launchers.get(correlation, _NONE) if correlation is not None else _NONE)
    return Interval(kernel.ts, kernel.end, OTHER if number == _NONE else CATEGORIES[number])


def _divide(
    busy: list[Interval], moments: list[Interval], start: float, end: float, seconds: dict[str, float]
) -> tuple[float, float]:
    """Add the times in which kernels run to their categories, and the others to those of the thread's moments.

    Returns the times in which communication runs, and in which nothing does.
    """
    changes = [(max(each.start, start), 1, each.category) for each in busy]
    changes += [(each.end, -1, each.category) for each in busy]
    running: Counter[str] = Counter()
    idle: list[tuple[float, float]] = []
    together, reached = 0.0, start
    for time, change, category in [*sorted(changes), (end, 0, OTHER)]:
        span = time - reached
        if span > 0:
            computing = {name: count for name, count in running.items() if count and name != COMMUNICATION}
            for name, count in computing.items():
                seconds[name] += span * count / sum(computing.values())
            if running[COMMUNICATION]:
                together += span
                seconds[COMMUNICATION] += 0.0 if computing else span
            elif not computing:
                idle.append((reached, time))
            reached = time
        running[category] += change
    left = iter(moments)
    moment = next(left)
    for begins, ends in idle:
        at = begins
        while at < ends:
            while moment.end <= at:
                moment = next(left)
            category = moment.category if moment.category in (LOADING, BETWEEN) else HOST
            seconds[category] += min(ends, moment.end) - at
            at = min(ends, moment.end)
    return together, sum(ends - begins for begins, ends in idle)


def _covered(events: Iterable[Event], start: float, end: float) -> float:
    """Return the time from one time to another in which any of some events goes on."""
    total, reached = 0.0, start
    for event in sorted(events, key=lambda event: event.ts):
        begins, ends = max(event.ts, reached), min(event.end, end)
        total += max(0.0, ends - begins)
        reached = max(reached, ends)
    return total


def _gaps(busy: list[Interval], microseconds: float) -> list[Gap]:
    """Return the largest gaps between intervals, by what ended before and what begins after them."""
    idle: dict[tuple[str, str], float] = defaultdict(float)
    times: Counter[tuple[str, str]] = Counter()
    before: Interval | None = None
    for each in sorted(busy):
        if before is not None and each.start > before.end:
            idle[before.category, each.category] += each.start - before.end
            times[before.category, each.category] += 1
        if before is None or each.end > before.end:
            before = each
    count = microseconds / 1e6
    return [
        Gap(*pair, seconds=length / microseconds, times=times[pair] / count)
        for pair, length in sorted(idle.items(), key=lambda each: -each[1])[:NAMED_GAPS]
    ]


def _is_step(event: Event) -> bool:
    return event.cat == "user_annotation" and _STEP.fullmatch(event.name) is not None


_STEP = re.compile(rf"{STEP}\d{{1,18}}")


@cache
def _number(name: str) -> int:
    """Return the number of a name's category; _NONE if it matches none."""
    found = (number for number, pattern in enumerate(PATTERNS.values()) if re.search(pattern, name))
    return next(found, _NONE)
