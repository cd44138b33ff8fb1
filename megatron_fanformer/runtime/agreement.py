"""Agreement of all ranks on the outcome of what one does, a value or an error that all raise, or on a value of each."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from megatron_fanformer.errors import FanformerError

# How often the main rank says that it is still at work. Anything that takes longer than the process group's time limit
# (a terabyte of tokens read from end to end) would otherwise end the ranks that wait for it.
BEAT_SECONDS = 1.0

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=FanformerError)


def is_main() -> bool:
    """Return whether this process is the main rank, or has no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_main(function: Callable[[], Result]) -> Result:
    """Return what a function returns on the main rank, on every rank of the current process group; a collective call.

    Only the main rank calls it, in a thread of its own; it must make no collective call itself, and return what can be
    pickled. In a process without ranks it is simply called.

    Raises:
        FanformerError: the function's own error, of the same class and message on every rank. On the others it is
            marked as reported elsewhere, so that the user reads it once. For any other exception, which the main rank
            raises unchanged, the others report its class and message.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    if is_main():
        value, failure = _shared_with_others(function)
    else:
        while (received := _broadcast(None)) is None:
            pass
        value, failure = received
    if failure is None:
        return cast(Result, value)
    dist.barrier()  # the main rank is about to exit: not before the others know why
    raise failure


def raise_on_all(failure: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise on all ranks of a group what its first one failed with, once each knows that it did; a collective call.

    Args:
        failure: on the first rank; None on the others.
        group: whose tensors are on the CPU.

    Raises:
        FanformerError: on the other ranks as `on_main` does; the first one raises its own, unchanged.
    """
    box = [None if failure is None else _for_others(failure)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    dist.barrier(group)  # as in `on_main`
    raise cast(Exception, failure or box[0])


def reported_by_main(failure: Failure) -> Failure:
    """Return an error that every rank raises by itself, on all but the main rank marked as reported elsewhere."""
    failure.already_reported = not is_main()
    return failure


def of_every_rank(value: Result) -> list[Result]:
    """Return the value of each rank, in their order, on all of them; a collective call, unless there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _shared_with_others(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what the function returned or raised, once the others have it."""
    outcome: list[tuple[Any, Exception | None]] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    worker = threading.Thread(target=work, name="on_main", daemon=True)  # a termination signal need not wait for it
    worker.start()
    worker.join(BEAT_SECONDS)
    while worker.is_alive():
        _broadcast(None)
        worker.join(BEAT_SECONDS)
    ((value, failure),) = outcome
    _broadcast((value, None if failure is None else _for_others(failure)))
    return value, failure


def _for_others(error: Exception) -> FanformerError:
    if isinstance(error, FanformerError):
        copy = type(error)(str(error))
    else:
        copy = FanformerError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    copy.already_reported = True
    return copy


def _broadcast(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
