"""Micro batches that one rank of a group reads for all of it, on gloo ranks."""

import dataclasses
import functools
from collections.abc import Callable, Generator
from datetime import timedelta
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.data.shared_batches import shared_batches
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime.collectives import count_collectives
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import for_host_tensors, rank_grid

RunOnRanks = Callable[..., list[Any]]

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


def stream(has_document_ids: bool, num_workers: int = 0) -> Generator[dict[str, Tensor], None, None]:
    return micro_batches(
        Drawn(has_document_ids),
        consumed_samples=0,
        micro_batch_size=SIZE,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=num_workers,
    )


def shared(has_document_ids: bool, *, num_workers: int, **options: bool) -> Generator[dict[str, Tensor], None, None]:
    group = dist.group.WORLD
    assert group is not None
    read = functools.partial(stream, has_document_ids, num_workers)
    shape = {"micro_batch_size": SIZE, "seq_length": LENGTH}
    return shared_batches(read, group, **shape, has_document_ids=has_document_ids, **options)


def taken_by_a_rank(has_document_ids: bool) -> tuple[list[dict[str, Tensor]], tuple[str, str, bool]]:
    """What it takes, and how it ends."""
    batches = shared(has_document_ids, num_workers=0)
    taken = []
    for _ in range(SAMPLES // SIZE):
        taken.append({name: tensor.clone() for name, tensor in next(batches).items()})
    with pytest.raises(CorruptError) as caught:
        next(batches)
    return taken, (type(caught.value).__name__, str(caught.value), caught.value.already_reported)


@pytest.mark.parametrize("has_document_ids", [False, True])
def test_all_ranks_take_what_the_first_one_reads(has_document_ids: bool, run_on_ranks: RunOnRanks) -> None:
    """To the bit, and its error."""
    expected = list(islice(stream(has_document_ids), SAMPLES // SIZE))
    first, *others = run_on_ranks(3, taken_by_a_rank, has_document_ids)
    for taken, *_ in (first, *others):
        for own, truth in zip(taken, expected, strict=True):
            assert own.keys() == truth.keys()
            assert all(own[name].dtype == truth[name].dtype and torch.equal(own[name], truth[name]) for name in own)
    message = ("CorruptError", "the last sample is damaged")
    assert first[1] == (*message, False)
    assert [other[1] for other in others] == [(*message, True)] * 2


def take_without_use() -> None:
    for batch in islice(shared(False, num_workers=0, is_used=False), SAMPLES // SIZE):
        assert not any(tensor.any() for tensor in batch.values()) and batch["tokens"].shape == (SIZE, LENGTH)


def test_a_rank_without_use_for_samples_takes_zeros(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(1, take_without_use)


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
