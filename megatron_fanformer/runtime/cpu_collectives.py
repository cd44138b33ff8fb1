"""Sums and gathers among the CPU ranks of one machine, through memory that they share.

gloo sends tensors through sockets even where no network is between, and scatters a sum by reducing the whole on every
rank. A sum here is the same on all ranks, bit for bit, and from run to run.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.shared_memory import PIECE_BYTES, Buffers, GroupMemory, Written

_Operation = Callable[..., torch.Tensor]
_Tensors = Sequence[torch.Tensor]
_Pieces = Generator[Written, Buffers, None]
"""A collective, piece by piece: yields what this rank writes, and is sent all ranks' buffers once each has written."""

_is_enabled = True


@contextmanager
def shared_memory_collectives(*, enabled: bool) -> Iterator[None]:
    """Sum and gather through shared memory while the block runs, or leave all to gloo; the same on every rank."""
    global _is_enabled
    before, _is_enabled = _is_enabled, enabled
    try:
        yield
    finally:
        _is_enabled = before


def install() -> None:
    """Replace the methods of process groups by which torch.distributed's functions sum and gather.

    Where the ranks are not CPUs of one machine, or the operation is not a sum or a maximum of numbers, or is
    refused by gloo, they do as before; so does everything where `shared_memory_collectives` turns them off.
    """
    for names, pieces_of in (
        (("allreduce", "allreduce_coalesced"), _all_reduce),
        (("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), _reduce_scatter),
        (("reduce_scatter_single", "reduce_scatter_single_coalesced"), _reduce_scatter),
        (("_allgather_base", "allgather_into_tensor_coalesced"), _all_gather),
        (("all_gather_single", "all_gather_single_coalesced"), _all_gather),
    ):
        for name in names:  # torch 2.13 renamed them, and has both
            if hasattr(dist.ProcessGroup, name):
                method = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, _through_memory(method, pieces_of, name.endswith("coalesced")))


def _through_memory(
    method: Callable[..., Any], pieces_of: Callable[..., _Pieces], is_coalesced: bool
) -> Callable[..., Any]:
    is_sum = pieces_of is not _all_gather

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        """Begin the collective through memory, or leave it to the method that this one replaces."""
        if not _is_enabled:
            return method(group, *args, **kwargs)
        # Of a gather torch 2.11 gives no options.
        *tensors, options = args if hasattr(args[-1], "asyncOp") else (*args, None)
        operation = _operation(options)
        if group.size() == 1 or kwargs or (is_sum and operation is None):
            return method(group, *args, **kwargs)
        if is_sum and is_coalesced and options.asyncOp:
            return method(group, *args)  # gradients, to be summed beside backward: gloo's threads do that
        lists = [[each] if isinstance(each, torch.Tensor) else each for each in tensors]
        if not _fit(lists, group.size(), is_sum=is_sum):
            return method(group, *args)
        memory = GroupMemory.of(group)
        if memory is None or memory.is_in_use:
            return method(group, *args)
        return CollectiveThroughMemory(memory, pieces_of(memory, operation, *lists))

    return call


def _operation(options: Any) -> _Operation | None:
    """Return what joins two operands; None where that is left to gloo."""
    operation = getattr(options, "reduceOp", None)
    if operation == dist.ReduceOp.SUM:
        return torch.add
    return torch.maximum if operation == dist.ReduceOp.MAX else None


def _fit(lists: list[_Tensors], ranks: int, *, is_sum: bool) -> bool:
    """Return whether all are blocks on the CPU, a whole of the type of its part and `ranks` times as large."""
    for tensors in zip(*lists, strict=True):
        kind = tensors[0].dtype
        if not all(each.device.type == "cpu" and each.dtype == kind and each.is_contiguous() for each in tensors):
            return False
        part, *whole = sorted(each.numel() for each in tensors)
        if (whole and whole != [ranks * part]) or (is_sum and not kind.is_floating_point):
            return False
    return True


class CollectiveThroughMemory(dist.Work):
    """A collective whose first piece this rank has written; the others follow in `wait`.

    So all ranks must wait for those of all their groups in the same order, as ranks of one program do.
    """

    def __init__(self, memory: GroupMemory, pieces: _Pieces) -> None:
        super().__init__()
        self._memory, self._pieces = memory, pieces
        self._buffers: Buffers | None = None
        self._advance()

    def _advance(self) -> None:
        with torch.no_grad(), torch.profiler.record_function(type(self).__name__):  # weights may be gathered
            try:
                self._buffers = self._memory.write(self._pieces.send(self._buffers))  # type: ignore[arg-type]
            except StopIteration:
                self._buffers = None
        self._memory.is_in_use = self._buffers is not None

    def wait(self, timeout: Any = None) -> bool:
        """Take what the other ranks wrote, piece by piece."""
        while self._buffers is not None:
            self._memory.wait()
            self._advance()
        return True

    def is_completed(self) -> bool:
        """Return whether it was waited for: nothing goes on by itself."""
        return self._buffers is None


def _all_reduce(memory: GroupMemory, operation: _Operation, tensors: _Tensors) -> _Pieces:
    for tensor in tensors:
        flat = tensor.view(-1)
        if tensor.nbytes * memory.size <= 2 * PIECE_BYTES:  # in one delay in place of two
            yield from _sum(flat, operation)
        else:
            parts = flat.tensor_split(memory.size)
            yield from _sum_of_part(memory, operation, parts[memory.rank], parts)
            yield from _gathered_parts(memory, parts)


def _reduce_scatter(memory: GroupMemory, operation: _Operation, outputs: _Tensors, inputs: _Tensors) -> _Pieces:
    for output, whole in zip(outputs, inputs, strict=True):
        yield from _sum_of_part(memory, operation, output.view(-1), whole.view(-1).chunk(memory.size))


def _all_gather(memory: GroupMemory, _operation: None, outputs: _Tensors, inputs: _Tensors) -> _Pieces:
    for output, own in zip(outputs, inputs, strict=True):
        parts = output.view(-1).chunk(memory.size)
        if parts[memory.rank].data_ptr() != own.data_ptr():
            parts[memory.rank].copy_(own.view(-1))
        yield from _gathered_parts(memory, parts)


def _sum(tensor: torch.Tensor, operation: _Operation) -> _Pieces:
    """Sum the whole tensors of all ranks in each, in the ranks' order."""
    buffers = yield [(0, tensor)]
    first, second, *others = (buffer.view(tensor.dtype)[: len(tensor)] for buffer in buffers)
    operation(first, second, out=tensor)
    for other in others:
        operation(tensor, other, out=tensor)


def _sum_of_part(memory: GroupMemory, operation: _Operation, output: torch.Tensor, parts: _Tensors) -> _Pieces:
    """Sum its part of all ranks' tensors in each rank; the part may lie where the sum is to go."""
    length = PIECE_BYTES // memory.size // output.element_size()
    others = [rank for rank in range(memory.size) if rank != memory.rank]
    for begin in range(0, max(map(len, parts)), length):
        piece = slice(begin, begin + length)
        buffers = yield [(rank * length, parts[rank][piece]) for rank in others]
        total, joined = output[piece], parts[memory.rank][piece]
        for other in others:
            theirs = buffers[other].view(output.dtype)[memory.rank * length :][: len(total)]
            joined = operation(joined, theirs, out=total)


def _gathered_parts(memory: GroupMemory, parts: _Tensors) -> _Pieces:
    """Gather the other ranks' parts of a tensor in each rank."""
    length = PIECE_BYTES // parts[0].element_size()
    for begin in range(0, max(map(len, parts)), length):
        pieces = [part[begin : begin + length] for part in parts]
        buffers = yield [(0, pieces[memory.rank])]
        for rank, piece in enumerate(pieces):
            if rank != memory.rank:
                piece.copy_(buffers[rank].view(piece.dtype)[: len(piece)])
