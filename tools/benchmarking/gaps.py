"""When a GPU has nothing to do: the gaps between the kernels of a profile, by what ran before and after each."""

from collections import Counter
from typing import Any, NamedTuple

import torch

from benchmarking.breakdown import category

NAMED = 8  # kinds of gaps that are listed


class Interval(NamedTuple):
    """A kernel; on a CPU an operator that no other one called."""

    start: float
    """Microseconds."""
    end: float
    name: str


def gaps(profile: torch.profiler.profile) -> dict[str, Any]:
    """The share of the time from the first kernel to the last in which none ran, and its largest parts.

    On a CPU, of operators of the thread that has most of them.
    """
    intervals = _intervals(profile.events())
    idle: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    busy_until, before = intervals[0].end, intervals[0].name
    for each in intervals[1:]:
        if each.start > busy_until:
            between = category([before]), category([each.name])
            idle[between] += each.start - busy_until
            times[between] += 1
        if each.end > busy_until:
            busy_until, before = each.end, each.name
    whole = busy_until - intervals[0].start
    return {
        "idle_share": idle.total() / whole,
        "gaps": [
            {"after": after, "before": before, "share": idle[after, before] / whole, "times": times[after, before]}
            for (after, before), _ in idle.most_common(NAMED)
        ],
    }


def _intervals(events: Any) -> list[Interval]:
    kernels = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    found = [event for event in kernels if not event.is_user_annotation]
    if not kernels:
        outermost = [event for event in events if event.cpu_parent is None]
        threads = Counter(event.thread for event in outermost)
        [(busiest, _)] = threads.most_common(1)
        found = [event for event in outermost if event.thread == busiest]
    return sorted(Interval(event.time_range.start, event.time_range.end, event.name) for event in found)
