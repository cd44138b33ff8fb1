"""How long a rank waits in collectives, measured where they begin and end: at the process groups and at their work.

What a rank's step takes beyond that is its own work. A rank that is slower than the others waits less than they do.

On a CPU the caller waits, and a clock says how long. On a GPU the caller goes on, and the stream of the computation
waits: a pair of events on it around each collective, and around each wait for one, says how long it stood still, be it
for a peer or for the bytes. What overlaps with computation costs neither.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.collectives import COLLECTIVES, methods_replaced
from megatron_fanformer.runtime.config import DeviceKind
from megatron_fanformer.runtime.cpu_collectives import CollectiveThroughMemory

# Messages of a pipeline are received, too, and several may be sent as one.
_CALLS = (*COLLECTIVES, "recv", "recv_anysource", "_end_coalescing")


class Waits:
    """The waits of a `timed_waits` block."""

    def __init__(self, device: DeviceKind) -> None:
        self._on_gpu = device == "cuda"
        self._host_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call that may wait."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._host_seconds += time.perf_counter() - began
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            began_event, ended_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began_event.record()
            yield
            ended_event.record()
            self._events.append((began_event, ended_event))

    def seconds(self) -> float:
        """All of them together; waits for the device."""
        for _, ended in self._events:  # they may be on several streams
            ended.synchronize()
        return self._host_seconds + sum(began.elapsed_time(ended) for began, ended in self._events) / 1000


@contextmanager
def timed_waits(device: DeviceKind) -> Iterator[Waits]:
    """Measure how long this process waits in collectives while the block runs. Must not be nested."""
    waits = Waits(device)

    def timed(_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with waits.one():
                return method(self, *args, **kwargs)

        return call

    with (
        methods_replaced(dist.ProcessGroup, _CALLS, timed),
        methods_replaced(dist.Work, ("wait",), timed),
        methods_replaced(CollectiveThroughMemory, ("wait",), timed),
    ):
        yield waits
