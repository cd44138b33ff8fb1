"""The store at which ranks meet, and collective calls that share one rank's result or error, or the values of all.

torch's stores neither authenticate nor encrypt. The store for the ranks of one machine listens on its loopback alone.
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
LONGEST_WORK = timedelta(days=7)  # such as checksums of a terabyte of tokens: longer than a collective may wait

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=FanformerError)


def loopback_store() -> dist.TCPStore:
    """Start a store in this process for ranks of this machine, and return it."""
    listener = socket.create_server((LOOPBACK, 0), backlog=WAITING_CLIENTS)
    port = listener.getsockname()[1]
    # The store closes the listener. Without one, it would listen on every interface.
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def store_of_ranks(address: devices.RankAddress, timeout: timedelta) -> Any:
    """Return the store at which the ranks meet; rank 0 hosts the store unless the launcher does.

    Raises:
        FanformerError: rank 0 is not reached in time, or the store's port is taken.
    """
    url = f"tcp://{address.master_address}:{address.master_port}"
    _await_name(address.master_address, timeout.total_seconds())
    try:
        store, _, _ = next(dist.rendezvous(url, address.rank, address.world_size, timeout=timeout))
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise FanformerError(
            f"rank {address.rank} of {address.world_size} cannot meet the others at {url} ({reason}); check that all "
            "nodes were started with the same MASTER_ADDR and a free MASTER_PORT, and reach each other"
        ) from error
    return dist.PrefixStore(f"ranks-{devices.restart_count()}", store)  # torchrun's store keeps old keys


def _await_name(name: str, seconds: float) -> None:
    """Wait until a host name resolves: a Kubernetes pod's name does so only some time after the pod's start.

    Raises FanformerError after `seconds`.
    """
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

    The other ranks wait for as long as the call takes. The value must be one that can be pickled. Without a process
    group, the function is simply called.

    Raises:
        FanformerError: the function raised an error. The main rank raises it unchanged. The other ranks raise an error
            of the same class and message (or, if it is not a FanformerError, one that states its class and message),
            marked as reported elsewhere, so that the user reads it once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    store = _get_default_store()
    calls = store.add(f"calls of rank {dist.get_rank()}", 1)  # every rank has made as many
    key = f"on_main {calls}"
    value, failure = None, None
    if is_main():
        try:
            value = function()
        except Exception as error:
            failure = error
        outcome: Any = pickle.dumps((value, None if failure is None else _for_others(failure)))
        store.set(key, outcome)
    else:
        store.wait([key], LONGEST_WORK)
        value, failure = pickle.loads(store.get(key))
    if failure is None:
        return cast(Result, value)
    dist.barrier()  # the main rank, which may host the store, must not exit before the others have read the error
    raise failure


def raise_on_all(failure: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise an error of a group's first rank on all ranks of the group; a collective call, of a group for CPU tensors.

    No rank raises before all ranks know the error.

    Args:
        failure: the error on the first rank, which raises it unchanged; None on the others.

    Raises:
        FanformerError: on the other ranks, with the error's message, marked as reported elsewhere.
    """
    box = [None if failure is None else _for_others(failure)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    dist.barrier(group)  # the first rank must not exit before the others have the error
    raise cast(Exception, failure or box[0])


def reported_by_main(failure: Failure) -> Failure:
    """Return an error that every rank raises by itself, marked as reported elsewhere on all ranks but the main one."""
    failure.already_reported = not is_main()
    return failure


def gather_values(value: Result) -> list[Result]:
    """Return the values of all ranks, in rank order, on every rank; a collective call, unless there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _for_others(error: Exception) -> FanformerError:
    """Return a copy of this rank's error for the other ranks, marked as reported elsewhere."""
    if isinstance(error, FanformerError):
        copy = type(error)(str(error))
    else:
        copy = FanformerError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    copy.already_reported = True
    return copy
