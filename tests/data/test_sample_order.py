"""Orders of samples: stored ones equal those in memory."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data import sample_order
from megatron_fanformer.data.sample_order import epoch_order, shuffled
from megatron_fanformer.errors import CorruptError, InputError

SAMPLES, SEED = 5000, 6198


@pytest.fixture
def store_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "LEAST_STORED", 1)


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
