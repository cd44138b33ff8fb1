"""The store of the ranks; agreement on the outcome of one rank's work, or on the values of all.

torch's stores neither authenticate nor encrypt. The store of ranks of one machine listens on its loopback alone.
"""

import logging
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime import device as devices

LOOPBACK = "127.0.0.1"
WAITING_CLIENTS = 4096  # connections that the kernel holds until the store answers them: ranks come all at once
LONGEST_WORK = timedelta(days=7)  # such as a terabyte of tokens, summed: longer than a collective may wait

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=FanformerError)


def loopback_store() -> dist.TCPStore:
    """Return a store of this process for ranks of this machine."""
    listener = socket.create_server((LOOPBACK, 0), backlog=WAITING_CLIENTS)
    port = listener.getsockname()[1]
    # The store closes the listener. Without one, it would listen on every interface.
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def store_of_ranks(address: devices.RankAddress, timeout: timedelta) -> Any:
    """Return the store of the ranks, which the first one hosts unless their launcher does.

    Raises:
        FanformerError: the first rank is not reached in time, or its port is taken.
    """
    where = f"tcp://{address.master_address}:{address.master_port}"
    _await_name(address.master_address, timeout.total_seconds())
    try:
        store, _, _ = next(dist.rendezvous(where, address.rank, address.world_size, timeout=timeout))
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise FanformerError(
            f"rank {address.rank} of {address.world_size} cannot meet the others at {where} ({reason}); check that all "
            "nodes were started with the same MASTER_ADDR and a free MASTER_PORT, and reach each other"
        ) from error
    return dist.PrefixStore(f"ranks-{devices.restart_count()}", store)  # torchrun's is the same after a restart


def _await_name(name: str, seconds: float) -> None:
    """Wait until a name resolves: a Kubernetes pod's appears after the pod has started."""
    end, is_reported = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            reason = f"MASTER_ADDR {name} does not resolve ({error.strerror})"
            if time.monotonic() > end:
                raise FanformerError(f"{reason}; check the name, and that the first node is up") from error
            if not is_reported:
                logger.warning("%s; waiting %.0f s for it", reason, seconds)
            is_reported = True
            time.sleep(1)


def is_main() -> bool:
    """Return whether this process is the main rank, or has no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_main(function: Callable[[], Result]) -> Result:
    """Call a function on the main rank, and return its value on every rank of the process group; a collective call.

    Only the main rank calls it; the others wait for as long as it takes. Its value must be one that can be pickled. In
    a process without ranks it is simply called.

    Raises:
        FanformerError: the function's own error, of the same class and message on every rank. On the others it is
            marked as reported elsewhere, so that the user reads it once. For any other exception, which the main rank
            raises unchanged, the others report its class and message.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    store = _get_default_store()
    key = f"on_main {store.add(f'calls of rank {dist.get_rank()}', 1)}"
    value, failure = None, None
    if is_main():
        try:
            value = function()
        except Exception as error:
            failure = error
        outcome: Any = pickle.dumps((value, None if failure is None else _for_others(failure)))  # bytes, which it takes
        store.set(key, outcome)
    else:
        store.wait([key], LONGEST_WORK)
        value, failure = pickle.loads(store.get(key))
    if failure is None:
        return cast(Result, value)
    dist.barrier()  # the main rank is about to exit: not before the others know why
    raise failure


def raise_on_all(failure: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise the error of a group's first rank on all of its ranks, once each knows of it; a collective call.

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


def _for_others(error: Exception) -> FanformerError:
    if isinstance(error, FanformerError):
        copy = type(error)(str(error))
    else:
        copy = FanformerError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    copy.already_reported = True
    return copy
