from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.data.npy_dataset import NpyDataset
from megatron_fanformer.data.npy_files import open_npy_files
from megatron_fanformer.data.sample_order import epoch_order
from tests.data.token_making import VOCAB_SIZE, write_npy

SEQ_LENGTH = 8
SEED = 6198
TOKENS = (9_001, 5, 8_000, 3_207)  # of each file: with a tail, without a whole sample, without a tail
SAMPLES = sum(tokens // SEQ_LENGTH for tokens in TOKENS)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [write_npy(tmp_path / f"{number}.npy", tokens, seed=number) for number, tokens in enumerate(TOKENS)]


def dataset_of(paths: list[str], *, samples: int | None = None, seed: int = SEED) -> NpyDataset:
    return NpyDataset(
        open_npy_files(paths, "uint16"), seq_length=SEQ_LENGTH, seed=seed, vocab_size=VOCAB_SIZE, samples=samples
    )


def slices(paths: list[str]) -> list[list[int]]:
    """Every whole sample of the raw files, in their order, with nothing of the package."""
    raw = [np.fromfile(path, "<u2") for path in paths]
    return [
        file[first : first + SEQ_LENGTH].tolist()
        for file in raw
        for first in range(0, len(file) - SEQ_LENGTH + 1, SEQ_LENGTH)
    ]


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_first_thousand_samples_are_those_of_numpys_own_shuffle(paths: list[str], epoch: int) -> None:
    numbers = np.arange(SAMPLES, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(SEED + epoch)).shuffle(numbers)
    assert epoch_order(SAMPLES, seed=SEED, epoch=epoch)[:1000].tolist() == numbers[:1000].tolist()
    dataset, raw = dataset_of(paths, samples=8 * SAMPLES), slices(paths)
    assert len(raw) == SAMPLES
    drawn = [dataset[epoch * SAMPLES + position]["tokens"].tolist() for position in range(1000)]
    assert drawn == [raw[number] for number in numbers[:1000]]


def test_an_epoch_takes_every_sample_once(paths: list[str]) -> None:
    dataset = dataset_of(paths)
    assert len(dataset) == SAMPLES
    assert sorted(dataset[index]["tokens"].tolist() for index in range(SAMPLES)) == sorted(slices(paths))


def test_the_order_does_not_depend_on_how_much_is_asked_for(paths: list[str]) -> None:
    fewer, more = dataset_of(paths, samples=SAMPLES + 50), dataset_of(paths, samples=9 * SAMPLES)
    for index in (0, 1, SAMPLES - 1, SAMPLES, SAMPLES + 49):
        assert torch.equal(fewer[index]["tokens"], more[index]["tokens"])


def test_labels_are_the_samples_own_tokens_and_the_last_is_masked(paths: list[str]) -> None:
    item = dataset_of(paths)[3]
    assert {name: (tuple(value.shape), value.dtype) for name, value in item.items()} == {
        "tokens": ((SEQ_LENGTH,), torch.int64),
        "labels": ((SEQ_LENGTH,), torch.int64),
        "loss_mask": ((SEQ_LENGTH,), torch.float32),
        "position_ids": ((SEQ_LENGTH,), torch.int64),
    }
    assert torch.equal(item["labels"][:-1], item["tokens"][1:])
    assert item["loss_mask"].tolist() == [1.0] * (SEQ_LENGTH - 1) + [0.0]
    assert item["position_ids"].tolist() == list(range(SEQ_LENGTH))


def test_loader_processes_do_not_change_the_order(paths: list[str]) -> None:
    """Over the end of an epoch."""

    def drawn(num_workers: int) -> list[list[list[int]]]:
        batches = micro_batches(
            dataset_of(paths, samples=3 * SAMPLES),
            consumed_samples=SAMPLES - 5,
            micro_batch_size=2,
            data_parallel_rank=1,
            data_parallel_size=2,
            num_workers=num_workers,
        )
        return [batch["tokens"].tolist() for batch in islice(batches, 6)]

    assert drawn(0) == drawn(2)


@pytest.mark.parametrize("index", [-1, SAMPLES])
def test_there_is_no_sample_outside_the_length(paths: list[str], index: int) -> None:
    with pytest.raises(IndexError):
        dataset_of(paths)[index]
