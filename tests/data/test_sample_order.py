"""Orders of samples: stored ones equal those in memory, computed ones take every sample once."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data import sample_order
from megatron_fanformer.data.npy_dataset import NpyDataset
from megatron_fanformer.data.npy_files import NpyFile
from megatron_fanformer.data.sample_order import MOST_SHUFFLED, KeyedPermutation, epoch_order, shuffled
from megatron_fanformer.errors import CorruptError, InputError

SAMPLES, SEED = 5000, 6198
MANY = 5 * 10**9  # samples of 2,048 tokens: 10T


@pytest.fixture
def store_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "LEAST_STORED", 1)


# -- stored


def test_a_stored_order_is_the_shuffle(store_all: None, tmp_path: Path) -> None:
    for epoch in (0, 3):
        stored = epoch_order(SAMPLES, seed=SEED, epoch=epoch, cache=tmp_path)
        assert [stored[position] for position in range(SAMPLES)] == shuffled(SAMPLES, seed=SEED, epoch=epoch).tolist()


def make_order(cache: Path, results: Any) -> None:
    made = []
    plain = sample_order.shuffled
    sample_order.LEAST_STORED = 1
    sample_order.shuffled = lambda *args, **options: made.append(args) or plain(*args, **options)
    results.put((epoch_order(SAMPLES, seed=SEED, epoch=0, cache=cache)[17], len(made)))


def test_one_process_makes_it_and_all_read_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=make_order, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert {entry for entry, _ in found} == {shuffled(SAMPLES, seed=SEED, epoch=0)[17]}
    assert sum(made for _, made in found) == 1


def test_a_damaged_one_is_named(store_all: None, tmp_path: Path) -> None:
    epoch_order(SAMPLES, seed=SEED, epoch=0, cache=tmp_path)
    (order,) = tmp_path.rglob("*.npy")
    for content in (order.read_bytes()[:-4], b""):
        order.write_bytes(content)
        with pytest.raises(CorruptError, match=rf"orders/{SAMPLES}-{SEED}\.npy does not hold .*; remove it and resume"):
            epoch_order(SAMPLES, seed=SEED, epoch=0, cache=tmp_path)


def test_a_folder_that_cannot_be_written(store_all: None, tmp_path: Path) -> None:
    (tmp_path / "orders").write_text("")
    with pytest.raises(InputError, match=r"cannot be stored in .* \(File exists\); set data\.cache_path"):
        epoch_order(SAMPLES, seed=SEED, epoch=0, cache=tmp_path)


# -- computed


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 64, 1000, 1025])
def test_a_computed_order_takes_every_sample_once(samples: int) -> None:
    order = KeyedPermutation(samples, seed=1)
    assert sorted(order) == list(range(samples))
    with pytest.raises(IndexError):
        order[samples]


def test_the_computed_order_stays_what_it_is() -> None:
    """A run that resumes would otherwise read other samples."""
    order = epoch_order(MANY, seed=SEED, epoch=1)
    assert [order[position] for position in (0, 1, 2**32, MANY - 1)] == GOLDEN
    assert [KeyedPermutation(MANY, seed=SEED + 1)[position] for position in (0, 1)] == GOLDEN[:2]


GOLDEN = [1719785878, 4918501337, 267709991, 276843276]


def test_ten_trillion_tokens_have_places() -> None:
    """Of files that are not there: neither memory nor time goes with their number of samples."""
    file = NpyFile("none.npy", np.dtype("<u2"), MANY // 4 * 2048 + 7, 0)
    dataset = NpyDataset([file] * 4, seq_length=2048, seed=SEED, vocab_size=10)
    assert len(dataset) == MANY > MOST_SHUFFLED
    places = [dataset.place(index) for index in range(0, MANY, MANY // 1000)]
    assert all(0 <= first <= file.tokens - 2048 and first % 2048 == 0 for _, first in places)
    assert len({first for _, first in places}) > 990
