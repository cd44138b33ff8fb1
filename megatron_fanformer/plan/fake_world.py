"""A world of any size in which this process is the only rank: collectives that move nothing, tensors without content.

Everything that stands in the way of the trainer's own code there is here: a closed list, each with its reason, undone
at the end of the block. Checked on megatron-core 0.16.1 and 0.19.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

INVENTED = 1
"""Value of a tensor without content where the program reads one: a loss, a gradient norm. It only decides whether to go
on."""


class ContentlessTensors(FakeTensorMode):
    """Torch's fake tensors, for a program that communicates and reads an occasional number."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # the states of random generators are real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on shapes alone."""
        if func.namespace == "c10d":  # torch has no fake kernels of the coalesced ones; its own do no more than this
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:  # torch itself answers for constants, such as the kind of a mask
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return float(INVENTED) if args[0].dtype.is_floating_point else INVENTED


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process that rank: torch.distributed's default group, and tensors without content from here on."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _patched(rank), ContentlessTensors():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _patched(rank: int) -> Iterator[None]:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads

    with (
        # Every rank of a world makes all of its groups, tens of thousands of them; of those of others it keeps nothing.
        # megatron-core asks for some over gloo, which would look for its ranks.
        mock.patch.object(dist, "new_group", _own_groups(rank, dist.new_group)),
        # The optimizer asks all ranks which kinds of parameters they have, to have a group for each of them. A stage
        # has a layer at least, and so weights of every kind.
        mock.patch.object(dist, "all_gather_object", _answer_for_all),
        # Recomputation copies an output into the storage that it had: there is nothing to copy, and the copy of a
        # storage without content leaks.
        mock.patch.object(torch.UntypedStorage, "copy_", lambda storage, *_: storage),
        # It makes a tensor of a list of norms by reading each, past what answers for a tensor without content.
        mock.patch.object(clip_grads, "l2_norm_impl", _l2_norm),
        # It makes the shards of all replicas to take one: at a thousand replicas, most of the time of a simulation.
        mock.patch.object(param_and_grad_buffer, "shard_buffer", _Shards),
    ):
        yield


def _own_groups(rank: int, new_group: Any) -> Any:
    def own_group(ranks: list[int] | None = None, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, **{**options, "backend": "fake", "pg_options": None})

    return own_group


def _answer_for_all(answers: list[Any], own: Any, group: Any = None) -> None:
    answers[:] = [own] * len(answers)


def _l2_norm(_chunk_size: int, _overflow: Any, tensor_lists: Any, _per_tensor: bool) -> tuple[torch.Tensor, None]:
    norms = torch.stack([torch.norm(tensor) for tensors in tensor_lists for tensor in tensors])
    return torch.norm(norms).reshape(1).float(), None


class _Shards:
    """The equal shards of a buffer, each made on first use."""

    def __init__(self, buffer: torch.Tensor, number: int) -> None:
        self._buffer, self._size = buffer, buffer.numel() // number

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._buffer[index * self._size : (index + 1) * self._size]
