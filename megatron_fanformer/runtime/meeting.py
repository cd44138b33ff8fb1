"""The store at which ranks meet: who hosts it, and on which interface it listens.

torch's stores neither authenticate nor encrypt, and one that torch opens by itself listens on every interface. Here it
listens at the address that the ranks are given alone: on one machine, the loopback.
"""

import errno
import logging
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime import device as devices

LOOPBACK = "127.0.0.1"
WAITING_CLIENTS = 4096  # connections that the kernel holds until the store answers them: ranks come all at once

logger = logging.getLogger(__name__)


def hosted_store(address: str, port: int, **options: Any) -> dist.TCPStore:
    """Return a store of this process that listens at an address alone.

    Args:
        address: a name or number of this machine.
        port: 0 for any that is free.
        options: of `torch.distributed.TCPStore`.

    Raises:
        FanformerError: another process listens there.
    """
    listener = _listener(address, port)
    own_port = listener.getsockname()[1]
    # The store closes it.
    return dist.TCPStore(address, own_port, is_master=True, master_listen_fd=listener.detach(), **options)


def store_of_ranks(address: devices.RankAddress, timeout: timedelta) -> Any:
    """Return the c10d store of the ranks, once all of them are there.

    Raises:
        FanformerError: a rank did not come; the first one's port is taken.
    """
    where = f"tcp://{address.master_address}:{address.master_port}"
    try:
        if address.rank == 0 and not devices.store_is_hosted():
            own: Any = hosted_store(
                address.master_address, address.master_port, world_size=address.world_size, timeout=timeout
            )
        else:
            own, _, _ = next(dist.rendezvous(where, address.rank, address.world_size, timeout=timeout))
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise FanformerError(
            f"rank {address.rank} of {address.world_size} waited at {where} for the others, in vain ({reason}); check "
            "that all nodes were started with the same address, and reach each other"
        ) from error
    return dist.PrefixStore("ranks", own)


def _listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; on every interface where the address is not one of this machine's
    own.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, *_, place in found:
        try:
            return socket.create_server(place, family=family, backlog=WAITING_CLIENTS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FanformerError(
                    f"port {port} of {address} is taken by another process, so that the ranks cannot meet there; set "
                    "MASTER_PORT to one that is free"
                ) from None
    # As behind a network that translates addresses, or a cluster's virtual ones.
    logger.warning("%s is not an address of this machine: the ranks' store listens on every interface", address)
    return socket.create_server(("", port), backlog=WAITING_CLIENTS)
