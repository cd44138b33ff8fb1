"""Micro batches: in the order of the samples on any ranks, and read by one rank of a group for all of it."""

import dataclasses
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.data.batches import _raise_errors, micro_batches, shared_batches
from megatron_fanformer.errors import CorruptError, FanformerError
from megatron_fanformer.processes import manual_gc
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import for_host_tensors, rank_grid
from tests.plan.counting import count_collectives

RunOnRanks = Callable[..., list[Any]]

SEQ_LENGTH = 4
ONE_RANK = {"consumed_samples": 0, "data_parallel_rank": 0, "data_parallel_size": 1}


class Numbers:
    """A dataset whose sample n is full of n."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> dict[str, Any]:
        tokens = torch.full((SEQ_LENGTH,), sample)
        positions = torch.arange(SEQ_LENGTH)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(SEQ_LENGTH), "position_ids": positions}


def drawn(batches: int, *, samples: int = 1000, **settings: int) -> list[list[int]]:
    """The sample numbers of the first micro batches."""
    stream = micro_batches(Numbers(samples), **(ONE_RANK | settings))
    return [batch["tokens"][:, 0].tolist() for batch in islice(stream, batches)]


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (2, 3), (4, 1)])
def test_all_ranks_together_take_the_samples_in_order(ranks: int, size: int) -> None:
    per_rank = [
        drawn(5, micro_batch_size=size, data_parallel_rank=rank, data_parallel_size=ranks, consumed_samples=7)
        for rank in range(ranks)
    ]
    interleaved = [sample for batches in zip(*per_rank, strict=True) for batch in batches for sample in batch]
    assert interleaved == list(range(7, 7 + 5 * ranks * size))


def test_loader_processes_do_not_change_the_order(run_on_ranks: RunOnRanks) -> None:
    in_processes = partial(drawn, micro_batch_size=2, num_workers=2)  # which a rank forks
    assert run_on_ranks(1, in_processes, 6) == [drawn(6, micro_batch_size=2)]


def test_a_loader_process_that_is_killed_is_named() -> None:
    def batches() -> Iterator[Any]:
        yield [{}]
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.\nIt is possible that …")

    taken = _raise_errors(batches())
    assert next(taken) == {}
    with pytest.raises(FanformerError, match=r"/dev/shm\); give .* set data\.num_workers to 0 \(DataLoader worker"):
        next(taken)


def leaves_random_state(num_workers: int) -> bool:
    before = torch.get_rng_state()
    drawn(2, micro_batch_size=1, num_workers=num_workers)
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_trainings_random_state_is_not_touched(run_on_ranks: RunOnRanks, num_workers: int) -> None:
    assert run_on_ranks(1, leaves_random_state, num_workers) == [True]


class Circumstances(Numbers):
    """Samples of the reading process: its group, the signals that it ignores, and its collection of garbage."""

    def __getitem__(self, sample: int) -> dict[str, Any]:
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGUSR1)]
        return {**super().__getitem__(sample), "tokens": torch.tensor([os.getpgrp(), *ignored, gc.isenabled()])}


def circumstances_of_loaders() -> tuple[bool, list[int], int]:
    """The same of a loader that a rank starts in the middle of its run; the group as whether it is the rank's."""
    with manual_gc():
        batches = micro_batches(Circumstances(4), **ONE_RANK, micro_batch_size=1, num_workers=1)
        group, *ignored, collects = next(batches)["tokens"][0].tolist()
        batches.close()
    return group == os.getpgrp(), ignored, collects


def test_a_loader_process_leaves_signals_to_the_rank_and_collects_garbage(run_on_ranks: RunOnRanks) -> None:
    """The rank needs its batches until it has saved; and after a rewind it starts loaders while it collects none."""
    assert run_on_ranks(1, circumstances_of_loaders) == [(False, [1, 1], 1)]


SIZE, LENGTH, SAMPLES = 3, 5, 7  # odd: four-byte fields end within a word


class Drawn:
    """Samples of any numbers, each field's of its own; the last one cannot be read."""

    def __init__(self, has_document_ids: bool) -> None:
        self.has_document_ids = has_document_ids

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number == SAMPLES - 1:
            raise CorruptError("the last sample is damaged")
        draw = torch.Generator().manual_seed(number)
        tokens, labels, position_ids = torch.randint(2**62, (3, LENGTH), generator=draw)
        sample = {"tokens": tokens, "labels": labels, "position_ids": position_ids}
        sample["loss_mask"] = torch.rand(LENGTH, generator=draw)
        ids = torch.randint(2**31, (LENGTH,), generator=draw, dtype=torch.int32)
        return {**sample, "document_ids": ids} if self.has_document_ids else sample


def stream(has_document_ids: bool) -> Generator[dict[str, Tensor], None, None]:
    return micro_batches(Drawn(has_document_ids), **ONE_RANK, micro_batch_size=SIZE)


def taken_by_a_rank(has_document_ids: bool) -> tuple[list[dict[str, Tensor]], tuple[str, str, bool]]:
    """The batches that it takes, and the error at the end."""
    group, shape = dist.group.WORLD, {"micro_batch_size": SIZE, "seq_length": LENGTH}
    assert group is not None
    batches = shared_batches(partial(stream, has_document_ids), group, **shape, has_document_ids=has_document_ids)
    taken = []
    for _ in range(SAMPLES // SIZE):
        taken.append({name: tensor.clone() for name, tensor in next(batches).items()})
    with pytest.raises(CorruptError) as caught:
        next(batches)
    return taken, (type(caught.value).__name__, str(caught.value), caught.value.already_reported)


@pytest.mark.parametrize("has_document_ids", [False, True])
def test_all_ranks_take_what_the_first_one_reads(has_document_ids: bool, run_on_ranks: RunOnRanks) -> None:
    expected = list(islice(stream(has_document_ids), SAMPLES // SIZE))
    first, *others = run_on_ranks(3, taken_by_a_rank, has_document_ids)
    for taken, *_ in (first, *others):
        for own, truth in zip(taken, expected, strict=True):
            assert own.keys() == truth.keys()
            assert all(own[name].dtype == truth[name].dtype and torch.equal(own[name], truth[name]) for name in own)
    message = ("CorruptError", "the last sample is damaged")
    assert first[1] == (*message, False)
    assert [other[1] for other in others] == [(*message, True)] * 2


def test_a_rank_without_use_for_samples_takes_zeros() -> None:
    batches = shared_batches(mock.Mock(), mock.Mock(), micro_batch_size=SIZE, seq_length=LENGTH, is_used=False)
    for batch in islice(batches, 2):
        assert not any(tensor.any() for tensor in batch.values()) and batch["tokens"].shape == (SIZE, LENGTH)


def by_hosts() -> tuple[list[int], list[str]]:
    """Over a group that is made as beside NCCL's: this rank's place, and the first one's number; what is counted."""
    with rank_grid(ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2), "cpu") as grid:
        with mock.patch.object(dist, "get_backend", lambda _group: "nccl"):
            group = for_host_tensors(grid.groups.tp_cp, timedelta(minutes=1))
        assert group is not grid.groups.tp_cp and grid.samples_group is grid.groups.tp_cp
        found = torch.tensor([grid.rank])
        with count_collectives(dataclasses.replace(grid, samples_group=group)) as counts:
            dist.broadcast(found, group=group, group_src=0)
        return [group.rank(), int(found)], [f"{line.group} {line.kind}" for line in counts.lines()]


def test_beside_nccl_a_group_has_one_for_its_hosts(run_on_ranks: RunOnRanks) -> None:
    counted = ["tp_cp broadcast"]  # as `plan.communication` calls it
    assert run_on_ranks(4, by_hosts) == [(place, counted) for place in ([0, 0], [1, 0], [0, 2], [1, 2])]
