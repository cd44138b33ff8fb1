"""The store at which ranks meet: who hosts it, and on which interface it listens.

torch's stores neither authenticate nor encrypt, and one that torch opens by itself listens on every interface. Here it
listens at the address that the ranks are given alone: on one machine, the loopback.
"""

import errno
import logging
import socket
import time
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime import device as devices

LOOPBACK = "127.0.0.1"
WAITING_CLIENTS = 4096  # connections that the kernel holds until the store answers them: ranks come all at once

logger = logging.getLogger(__name__)


def hosted_store(address: str, port: int, *, has_other_machines: bool = False, **options: Any) -> dist.TCPStore:
    """Return a store of this process that listens at an address alone.

    Args:
        address: a name or number of this machine.
        port: 0 for any that is free.
        has_other_machines: whether others are to come from there, by the name's address as they know it.
        options: of `torch.distributed.TCPStore`.

    Raises:
        FanformerError: another process listens there.
    """
    listener = _listener(address, port, has_other_machines)
    own_port = listener.getsockname()[1]
    # The store closes it.
    return dist.TCPStore(address, own_port, is_master=True, master_listen_fd=listener.detach(), **options)


def store_of_ranks(address: devices.RankAddress, timeout: timedelta) -> Any:
    """Return the c10d store of the ranks, once all of them are there.

    Raises:
        FanformerError: a rank did not come; the first one's name does not resolve; its port is taken.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    _await_name(address.master_address, deadline)
    where = f"tcp://{address.master_address}:{address.master_port}"
    try:
        if address.rank == 0 and not devices.store_is_hosted():
            own: Any = hosted_store(
                address.master_address,
                address.master_port,
                has_other_machines=address.world_size > address.local_world_size,
                world_size=address.world_size,
                timeout=timeout,
            )
        else:
            own, _, _ = next(dist.rendezvous(where, address.rank, address.world_size, timeout=timeout))
        # A launcher's store holds nobody up, and torchrun's is the same after a restart, with all that was put into it.
        ranks = dist.PrefixStore(f"ranks-{devices.restart_count()}", own)
        if ranks.add("here", 1) == address.world_size:
            ranks.set("all here", "")
        ranks.wait(["all here"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise FanformerError(
            f"rank {address.rank} of {address.world_size} waited at {where} for the others, in vain ({reason}); check "
            "that all nodes were started with the same address, and reach each other"
        ) from error
    return ranks


def _await_name(name: str, deadline: float) -> None:
    """Wait until a name resolves: that of a Kubernetes pod appears after the pod has started."""
    waits_since = None
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            now = time.monotonic()
            if waits_since is None:
                waits_since = now
                logger.warning(
                    "MASTER_ADDR %s does not resolve (%s); waiting %.0f s for it", name, error.strerror, deadline - now
                )
            if now >= deadline:
                raise FanformerError(
                    f"MASTER_ADDR {name} did not resolve within {now - waits_since:.0f} s "
                    f"({error.strerror}); check the name, and that the first node is up"
                ) from error
            time.sleep(1)


def _listener(address: str, port: int, has_other_machines: bool) -> socket.socket:
    """Return a socket that listens at an address; on every interface where the address is not one of this machine's
    own, or is the loopback's by this machine's own table of hosts alone.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    is_stated = address == "localhost" or address in [place[0] for *_, place in found]
    for family, *_, place in found:
        if has_other_machines and not is_stated and ip_address(str(place[0]).partition("%")[0]).is_loopback:
            continue  # as many systems write their own name into /etc/hosts; others know it by another address
        try:
            return socket.create_server(place, family=family, backlog=WAITING_CLIENTS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FanformerError(
                    f"port {port} of {address} is taken by another process, so that the ranks cannot meet there; set "
                    "MASTER_PORT to one that is free"
                ) from None
    # As behind a network that translates addresses, or a cluster's virtual ones.
    logger.warning("%s is no address of this machine's network: the ranks' store listens on every interface", address)
    return socket.create_server(("", port), backlog=WAITING_CLIENTS)
