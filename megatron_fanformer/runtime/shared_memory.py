"""Memory that the ranks of a group on one machine share, and the pipes by which each notifies the others."""

import contextlib
import mmap
import os
import secrets
import select
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist

PIECE_BYTES = 2 * 2**20
"""Bytes that a rank writes at a time: few enough to be still in the processor's caches when the others read them."""

PEER_HAS_ENDED = "Connection closed by peer: another rank of this machine has ended"
_NAME = "fanformer-rank"


Written = list[tuple[int, torch.Tensor]]
"""Flat tensors, each with its first element in a rank's buffer: up to PIECE_BYTES."""
Buffers = list[torch.Tensor]
"""Bytes [PIECE_BYTES] of each rank."""


class GroupMemory:
    """Two buffers a rank, which it writes in turns.

    One is written again when all ranks have written the other one after it, and so have read this one: therefore only
    one collective may be going on.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, "GroupMemory | None"]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(
        self, rank: int, buffers: list[torch.Tensor], outgoing: list[int], incoming: list[int], seconds: float
    ):
        """Use memory that is connected.

        Args:
            buffers: bytes [2, PIECE_BYTES] of each rank.
            outgoing: descriptors of the pipes to the other ranks.
            incoming: of the pipes from them.
            seconds: how long they may be silent.
        """
        self.rank, self.size = rank, len(buffers)
        self._buffers, self._outgoing, self._incoming, self._seconds = buffers, outgoing, incoming, seconds
        self._polls = [select.poll() for _ in incoming]
        for poll, pipe in zip(self._polls, incoming, strict=True):
            poll.register(pipe, select.POLLIN)
        self._turn = 0
        self.is_in_use = False
        """Whether a collective is in progress."""
        weakref.finalize(self, _close, [*outgoing, *incoming])

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "GroupMemory | None":
        """Return a group's memory; None where its ranks share none. The first call is a collective of the group."""
        if group not in cls._of_group:
            backend = group._get_backend(torch.device("cpu"))
            cls._of_group[group] = _connect(backend) if isinstance(backend, dist.ProcessGroupGloo) else None
        return cls._of_group[group]

    def write(self, written: Written) -> Buffers:
        """Write this rank's share and notify the others; returns what to read after their notices (see wait).

        Raises:
            RuntimeError: one of them has ended.
        """
        self._turn = 1 - self._turn
        buffers = [buffer[self._turn] for buffer in self._buffers]
        for begin, tensor in written:
            buffers[self.rank].view(tensor.dtype)[begin : begin + tensor.numel()].copy_(tensor)
        try:
            for pipe in self._outgoing:
                os.write(pipe, b"\0")
        except BrokenPipeError:
            raise RuntimeError(PEER_HAS_ENDED) from None
        return buffers

    def wait(self) -> None:
        """Wait until all others have written.

        Raises:
            RuntimeError: one of them has ended, or is silent for too long.
        """
        for poll, pipe in zip(self._polls, self._incoming, strict=True):
            if not poll.poll(1000 * self._seconds):
                raise RuntimeError(f"another rank has been silent for {self._seconds:.0f} seconds")
            if not os.read(pipe, 1):
                raise RuntimeError(PEER_HAS_ENDED)


def _connect(gloo: Any) -> GroupMemory | None:
    """Return memory and pipes that all ranks of a group share; None if one rank cannot have them.

    Neither has a name in a file system, so both vanish with the last process that holds them, however it ends.
    """
    rank, size = gloo.rank(), gloo.size()
    key = secrets.randbits(62)
    own = [-1] * (1 + size)  # the memory, and where each rank is to write
    incoming = []
    with contextlib.suppress(OSError, AttributeError):  # refused, too many open files, or another system
        own[0] = os.memfd_create(_NAME)
        os.write(own[0], key.to_bytes(8, "little"))
        os.ftruncate(own[0], 2 * PIECE_BYTES)
        for other in range(size):
            if other != rank:
                pipe, own[1 + other] = os.pipe()
                incoming.append(pipe)
    places = torch.zeros(size, 2 + len(own), dtype=torch.int64)
    gloo.allgather([list(places)], [torch.tensor([os.getpid(), key, *own])]).wait()
    buffers, outgoing = [], []
    with contextlib.suppress(OSError, ValueError):  # on another machine, or of a memory that was refused its size
        for other, (process, theirs, memory, *pipes) in enumerate(places.tolist()):
            buffers.append(_map(process, memory, theirs))
            if other != rank:
                outgoing.append(os.open(f"/proc/{process}/fd/{pipes[rank]}", os.O_WRONLY))
    is_connected = torch.tensor([len(buffers) == size and len(outgoing) == size - 1], dtype=torch.uint8)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    gloo.allreduce([is_connected], options).wait()  # from here on no rank reads a key
    _close([descriptor for descriptor in own if descriptor >= 0])
    if not is_connected:
        _close([*incoming, *outgoing])
        return None
    return GroupMemory(rank, buffers, outgoing, incoming, gloo.options._timeout.total_seconds())


def _map(process: int, descriptor: int, key: int) -> torch.Tensor:
    """Return a rank's memory.

    Raises:
        OSError: it is not a process of this machine.
        ValueError: its memory has no size.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if _NAME not in os.readlink(path):
        raise OSError(f"{path} is another process's")
    opened = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(opened, 2 * PIECE_BYTES)
    finally:
        os.close(opened)
    if memory[:8] != key.to_bytes(8, "little"):
        raise OSError(f"{path} is another rank's")
    return torch.frombuffer(memory, dtype=torch.uint8).view(2, PIECE_BYTES)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
