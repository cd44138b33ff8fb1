"""Datasets of a run: the order of samples, blends and splits, and the folder of sample indices."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data import datasets
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import index_folder
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.durable_files import take_lock
from megatron_fanformer.errors import InputError
from tests.data.token_making import build, drawn, write_npy, write_pair

SEQ_LENGTH = 64


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "samples", [[300 + 10 * number] for number in range(30)])


@pytest.fixture
def other_prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "other", [[700]], seed=1000)


@pytest.fixture
def npy_files(tmp_path: Path) -> list[str]:
    """Two .npy files of 15 and 7 whole samples."""
    return [
        write_npy(tmp_path / f"{name}.npy", tokens, seed=2000 + tokens) for name, tokens in (("a", 1000), ("b", 500))
    ]


@pytest.mark.parametrize("train_samples", [100, 400])
def test_the_order_of_a_split_does_not_depend_on_how_much_is_validated(
    prefix: str, tmp_path: Path, train_samples: int
) -> None:
    """Within an epoch of training, of 293 samples, and beyond. One of validation has 39."""
    other = write_pair(tmp_path / "second", [[400]] * 20, seed=500)
    config = DataConfig(train_data=[prefix, other], split="90,10,0")
    few, many, none = (build(config, train_samples, valid_samples) for valid_samples in (20, 70, 0))
    assert torch.equal(drawn(few.train, train_samples), drawn(many.train, train_samples))
    assert torch.equal(drawn(few.train, train_samples), drawn(none.train, train_samples))
    assert len(few.valid["validation"]) >= 20 and len(many.valid["validation"]) >= 70


def test_files_without_weights_are_drawn_once_each_where_that_suffices(prefix: str, other_prefix: str) -> None:
    whole = sum((read_index(p).tokens - 1) // SEQ_LENGTH for p in (prefix, other_prefix))
    taken = drawn(build(DataConfig(train_data=[prefix, other_prefix]), train_samples=whole).train, whole)
    assert len(torch.unique(taken, dim=0)) == whole


@pytest.mark.parametrize("tokens", [SEQ_LENGTH, SEQ_LENGTH + 1])
def test_files_without_weights_may_be_as_short_as_a_sequence(prefix: str, tmp_path: Path, tokens: int) -> None:
    """Which has no label for its last token; with one token more it is a sample, drawn once. So it is in a split."""
    short = write_pair(tmp_path / "short", [[tokens]], seed=1000)
    whole = (read_index(prefix).tokens - 1) // SEQ_LENGTH + (tokens > SEQ_LENGTH)
    train = build(DataConfig(train_data=[prefix, short]), train_samples=whole).train
    taken = len(torch.unique(drawn(train, len(train)), dim=0))
    assert taken == len(train) == whole if tokens > SEQ_LENGTH else taken >= whole
    split = write_pair(tmp_path / "split", [[300], [tokens]], seed=2000)
    valid = build(DataConfig(train_data=[prefix, split], split="50,50,0"), 10, 5).valid["validation"]
    assert len(valid) >= 5


@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.5, 0.3, 0.2)])
def test_a_blends_weights_decide_where_samples_come_from(
    prefix: str, other_prefix: str, npy_files: list[str], weights: tuple[float, ...]
) -> None:
    paths = [prefix, other_prefix] if len(weights) == 2 else [prefix, *npy_files]
    words = [word for pair in zip(weights, paths, strict=True) for word in pair]
    train = build(DataConfig(train_data=words), train_samples=400).train
    sources = [int(train[sample]["dataset_id"]) for sample in range(400)]
    counts = [sources.count(number) for number in range(len(weights))]
    assert counts == pytest.approx([400 * weight for weight in weights], abs=2)  # greedy: off by a sample or two


def test_a_split_gives_disjoint_documents(prefix: str) -> None:
    config = DataConfig(train_data=[prefix], split="80,20,0")
    datasets = build(config, valid_samples=None)
    assert list(datasets.valid) == config.validation_sets
    documents = {name: set(d.document_index.tolist()) for name, d in (("t", datasets.train), *datasets.valid.items())}
    assert documents == {"t": set(range(24)), "validation": set(range(24, 30))}


@pytest.mark.parametrize("split", ["999,1,0", "50,49,1"])
def test_a_split_that_leaves_a_part_empty_is_an_input_error(prefix: str, split: str) -> None:
    with pytest.raises(InputError, match="none is left for"):
        build(DataConfig(train_data=[prefix], split=split))


def test_data_of_exactly_one_sample_are_enough(tmp_path: Path) -> None:
    """A sample of a pair needs the label of its last token, one of a .npy file has none there."""
    pair = write_pair(tmp_path / "pair", [[SEQ_LENGTH + 1]])
    npy = write_npy(tmp_path / "one.npy", SEQ_LENGTH)
    for source, written in ((pair, f"{pair}.bin"), (npy, npy)):
        datasets = build(DataConfig(train_data=[source], valid_data={"v": [source]}), 3, None)
        assert len(datasets.valid["v"]) == 1 and len(datasets.train) >= 3
        whole = np.fromfile(written, "<u2")[:SEQ_LENGTH].tolist()
        assert datasets.valid["v"][0]["tokens"].tolist() == whole == datasets.train[2]["tokens"].tolist()
    short = write_npy(tmp_path / "short.npy", SEQ_LENGTH - 1)
    for source, message in (
        (write_pair(tmp_path / "tokens", [[SEQ_LENGTH]]), "do not make a whole"),
        (short, "hold no whole"),
    ):
        with pytest.raises(InputError, match=message):
            build(DataConfig(train_data=[pair], valid_data={"v": [source]}), 3, None)


def test_replaced_data_do_not_meet_the_old_indices(prefix: str, tmp_path: Path) -> None:
    """Also where two lengths alone have changed, and neither their number nor their sum."""
    build(DataConfig(train_data=[prefix]))
    lengths = [[300 + 10 * number] for number in range(30)]
    lengths[3], lengths[4] = [lengths[3][0] - 1], [lengths[4][0] + 1]
    write_pair(Path(prefix), lengths)
    fresh = DataConfig(train_data=[prefix], cache_path=str(tmp_path / "fresh"))
    assert torch.equal(drawn(build(DataConfig(train_data=[prefix])).train, 50), drawn(build(fresh).train, 50))


def test_a_cache_that_cannot_be_written_is_an_input_error(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cache_path"):
        build(DataConfig(train_data=[prefix], cache_path=str(tmp_path / "file" / "cache")))


def first_samples(prefix: str, other_prefix: str, cache: str | None = None) -> list[list[int]]:
    config = DataConfig(train_data=["1", prefix, "1", other_prefix], cache_path=cache)
    return drawn(build(config).train, 20).tolist()


def test_two_ranks_share_a_cache_with_a_run_on_a_copy_elsewhere(
    prefix: str, other_prefix: str, tmp_path: Path, run_on_ranks: Callable[..., list[Any]]
) -> None:
    """megatron-core's names of the indices depend on where the files are, which is no part of what they depend on."""
    (tmp_path / "moved").mkdir()
    for file in (path for each in (prefix, other_prefix) for path in Path(each).parent.glob(f"{Path(each).name}.*")):
        shutil.copy(file, tmp_path / "moved")
    wanted = first_samples(prefix, other_prefix, str(tmp_path / "cache"))
    moved = [str(tmp_path / "moved" / Path(each).name) for each in (prefix, other_prefix)]
    assert run_on_ranks(2, first_samples, *moved, str(tmp_path / "cache")) == [wanted, wanted]
    assert len(list((tmp_path / "cache").glob("*/complete.json"))) == 2


# -- .npy files


@pytest.mark.parametrize("samples", [1, 7, 10])
def test_a_blend_finds_all_samples_that_it_draws(prefix: str, npy_files: list[str], samples: int) -> None:
    """A source's share may be rounded up by one."""
    train = build(DataConfig(train_data=["1", prefix, "2", npy_files[0]]), train_samples=samples).train
    assert len(drawn(train, samples)) == len(train) == samples


def test_npy_files_cannot_be_split(npy_files: list[str]) -> None:
    config = DataConfig(train_data=npy_files, split="9,1")
    assert any("data.split: cuts by documents, and .npy files" in line for line in config.problems())


def test_npy_files_and_pairs_without_weights_count_by_their_size(prefix: str, npy_files: list[str]) -> None:
    config = DataConfig(train_data=[prefix], valid_data={"v": [npy_files[0], prefix, npy_files[1]]})
    valid = build(config, valid_samples=None).valid["v"]
    pair = (read_index(prefix).tokens - 1) // SEQ_LENGTH
    assert len(valid) == pair + 22
    sources = [int(valid[sample]["dataset_id"]) for sample in range(len(valid))]
    assert sources.count(0) == pytest.approx(22, abs=1)


# -- the configuration


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train_data": ["nowhere"]}, "data.train_data: nowhere.bin does not exist"),
        ({"train_data": ["0", "a"]}, "not a positive number"),
        ({"valid_data": {"v": ["nowhere"]}}, "data.valid_data.v: nowhere.bin does not exist"),
        ({"valid_data": {"v": ["nowhere"]}, "split": "9,1"}, "data.split: cannot be combined with"),
        ({"split": "100,0,0"}, "data.split: '100,0,0' cuts off no validation part"),
        ({"split": "most"}, "data.split: 'most'"),
        ({"tokenizer": "nowhere.model"}, "data.tokenizer: nowhere.model does not exist"),
        ({"num_workers": -1}, "data.num_workers: -1"),
    ],
)
def test_each_problem_of_a_configuration_is_named(settings: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in DataConfig(**settings).problems())


# -- the folder of sample indices


def test_complete_indices_are_used_again_and_those_of_a_killed_job_built_again(prefix: str, tmp_path: Path) -> None:
    config, cache = DataConfig(train_data=[prefix]), tmp_path / ".index_cache"
    first = drawn(build(config).train, 50)
    before = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    assert torch.equal(drawn(build(config).train, 50), first)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*/*")} == before
    (mark,) = cache.glob("*/complete.json")
    mark.unlink()  # which is written last
    (index,) = cache.glob("*/*shuffle_index.npy")
    index.write_bytes(index.read_bytes()[:-8])
    assert torch.equal(drawn(build(config).train, 50), first)


def test_of_two_jobs_one_waits_until_the_other_has_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache := tmp_path / "cache").mkdir()
    other = take_lock(cache / ".lock", wait=False)
    assert other is not None
    monkeypatch.setattr(datasets.logger, "info", lambda *_: os.close(other))  # it has, once this one waits
    with index_folder(cache, "samples"):
        assert take_lock(cache / ".lock", wait=False) is None
