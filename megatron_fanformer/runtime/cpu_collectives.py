"""Sums and gathers among the CPU ranks of one machine, through memory that they share.

gloo sends tensors through sockets even where no network is between, and scatters a sum by reducing the whole on every
rank. A sum here is the same on all ranks, bit for bit, and from run to run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.shared_memory import PIECE_BYTES, GroupMemory, Piece

_Operation = Callable[..., torch.Tensor]
_Tensors = Sequence[torch.Tensor]


def install() -> None:
    """Replace the methods of process groups by which torch.distributed's functions sum and gather.

    Where the ranks are not CPUs of one machine, or what is asked for is not a sum or a maximum, they do as before.
    """
    for names, pieces_of, is_coalesced in (
        (("allreduce", "allreduce_coalesced"), _all_reduce, True),
        (("_reduce_scatter_base", "reduce_scatter_single"), _reduce_scatter, False),
        (("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _reduce_scatter, True),
        (("_allgather_base", "all_gather_single"), _all_gather, False),
        (("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _all_gather, True),
    ):
        for name in names:  # torch 2.13 renamed them, and has both
            if hasattr(dist.ProcessGroup, name):
                method = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, _through_memory(method, pieces_of, is_coalesced))


def _through_memory(
    method: Callable[..., Any], pieces_of: Callable[..., Iterator[Piece]], is_coalesced: bool
) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if group.size() == 1 or kwargs or not hasattr(args[-1], "asyncOp"):  # or not called as those functions do
            return method(group, *args, **kwargs)
        *tensors, options = args
        if not is_coalesced:
            tensors = [[tensor] for tensor in tensors]
        if not _is_done_here(tensors[0], options):
            return method(group, *args)
        memory = GroupMemory.of(group)
        if memory is None or memory.is_in_use:
            return method(group, *args)
        return CollectiveThroughMemory(memory, pieces_of(memory, *tensors, options))

    return call


def _is_done_here(tensors: _Tensors, options: Any) -> bool:
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    if not hasattr(options, "reduceOp"):
        return True
    return _operation(options) is not None and all(tensor.is_floating_point() for tensor in tensors)


def _operation(options: Any) -> _Operation | None:
    """What joins two operands; None where that is left to gloo."""
    if options.reduceOp == dist.ReduceOp.SUM:
        return torch.add
    return torch.maximum if options.reduceOp == dist.ReduceOp.MAX else None


class CollectiveThroughMemory(dist.Work):
    """A collective of which this rank has written the first piece; the others follow where it is waited for."""

    def __init__(self, memory: GroupMemory, pieces: Iterator[Piece]) -> None:
        super().__init__()
        self._memory, self._pieces = memory, pieces
        self._piece: Piece | None = None
        self._next()

    def _next(self) -> None:
        with torch.no_grad():  # what is summed or gathered may be weights
            self._piece = next(self._pieces, None)
            if self._piece is not None:
                self._buffers = self._memory.write(self._piece)
        self._memory.is_in_use = self._piece is not None

    def wait(self, timeout: Any = None) -> bool:
        """Take what the other ranks wrote, piece by piece."""
        while self._piece is not None:
            self._memory.hear()
            with torch.no_grad():
                self._piece.finish(self._buffers)
            self._next()
        return True


def _all_reduce(memory: GroupMemory, tensors: _Tensors, options: Any) -> Iterator[Piece]:
    operation = _operation(options)
    assert operation is not None
    for tensor in tensors:
        flat = tensor.view(-1)
        if tensor.nbytes * memory.size <= 2 * PIECE_BYTES:  # in one delay in place of two
            yield _sum(flat, operation)
        else:
            parts = flat.tensor_split(memory.size)
            yield from _sums_of_parts(memory, parts[memory.rank], parts, operation)
            yield from _gathered_parts(memory, parts)


def _reduce_scatter(memory: GroupMemory, outputs: _Tensors, inputs: _Tensors, options: Any) -> Iterator[Piece]:
    operation = _operation(options)
    assert operation is not None
    for output, whole in zip(outputs, inputs, strict=True):
        yield from _sums_of_parts(memory, output.view(-1), whole.view(-1).chunk(memory.size), operation)


def _all_gather(memory: GroupMemory, outputs: _Tensors, inputs: _Tensors, _options: Any) -> Iterator[Piece]:
    for output, own in zip(outputs, inputs, strict=True):
        parts = output.view(-1).chunk(memory.size)
        if parts[memory.rank].data_ptr() != own.data_ptr():
            parts[memory.rank].copy_(own.reshape(-1))
        yield from _gathered_parts(memory, parts)


def _sum(tensor: torch.Tensor, operation: _Operation) -> Piece:
    """Each rank joins the whole tensors of all, in the ranks' order."""

    def finish(buffers: list[torch.Tensor]) -> None:
        first, second, *others = (buffer.view(tensor.dtype)[: len(tensor)] for buffer in buffers)
        operation(first, second, out=tensor)
        for other in others:
            operation(tensor, other, out=tensor)

    return Piece([(0, tensor)], finish)


def _sums_of_parts(
    memory: GroupMemory, output: torch.Tensor, parts: _Tensors, operation: _Operation
) -> Iterator[Piece]:
    """Each rank joins its part of all ranks' tensors; it may lie where the sum is to go."""
    length = PIECE_BYTES // memory.size // output.element_size()
    others = [rank for rank in range(memory.size) if rank != memory.rank]
    for begin in range(0, max(map(len, parts)), length):
        end = begin + length

        def finish(buffers: list[torch.Tensor], own: slice = slice(begin, end)) -> None:
            total, joined = output[own], parts[memory.rank][own]
            for other in others:
                theirs = buffers[other].view(output.dtype)[memory.rank * length :][: len(total)]
                joined = operation(joined, theirs, out=total)

        yield Piece([(rank * length, parts[rank][begin:end]) for rank in others], finish)


def _gathered_parts(memory: GroupMemory, parts: _Tensors) -> Iterator[Piece]:
    """Each rank takes the others' parts of a tensor."""
    length = PIECE_BYTES // parts[0].element_size()
    for begin in range(0, max(map(len, parts)), length):
        pieces = [part[begin : begin + length] for part in parts]

        def finish(buffers: list[torch.Tensor], pieces: list[torch.Tensor] = pieces) -> None:
            for rank, piece in enumerate(pieces):
                if rank != memory.rank:
                    piece.copy_(buffers[rank].view(piece.dtype)[: len(piece)])

        yield Piece([(0, pieces[memory.rank])], finish)
