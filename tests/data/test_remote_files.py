"""Token files on other stores: a run reads what it reads of local ones, bit for bit, or ends with one line."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data import remote_files
from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import build_datasets
from megatron_fanformer.data.fingerprint import fingerprint_data
from megatron_fanformer.data.manifest import read_manifest
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.evaluate.config import PerplexityConfig
from megatron_fanformer.evaluate.survey import find_sets
from tests.checkpoint.stores import needs_server, s3_server
from tests.data.failing_stores import FORBIDDEN, REFUSED, Plan, http_server, planned
from tests.data.token_making import VOCAB_SIZE, write_manifest, write_npy, write_pair

SEQ_LENGTH, SAMPLES = 64, 40
BLENDS = {
    "npy": ["{}/one.npy", "{}/two.npy"],
    "pair": ["{}/first"],
    "weights": ["0.7", "{}/first", "0.3", "{}/second"],
    "mixed": ["0.5", "{}/first", "0.5", "{}/one.npy"],
    "blend": ["@{}/own.blend"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Token files of every kind; one pair and one .npy file with a manifest."""
    (made := tmp_path / "there").mkdir()
    write_pair(made / "first", [[200 + number] for number in range(30)])
    write_pair(made / "second", [[50, 60], [700]], seed=50)
    write_npy(made / "one.npy", 3000, seed=1)
    write_npy(made / "two.npy", 2077, seed=2)
    write_manifest(str(made / "first"), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
    write_manifest(str(made / "one"), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
    (made / "own.blend").write_text("first # its folder's\nsecond\n")
    return made


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    remote_files.forget_files()
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 12)
    monkeypatch.setattr(remote_files, "REQUEST_SECONDS", 5.0)


SERVED = {"planned": planned, "http": http_server}


def config_of(place: Path | str, cache: Path, blend: str = "npy", **fields: Any) -> DataConfig:
    return DataConfig(train_data=[word.format(place) for word in BLENDS[blend]], cache_path=str(cache), **fields)


def train_set(config: DataConfig, samples: int = SAMPLES) -> Any:
    sizes = {"train_samples": samples, "valid_samples": 4}
    return build_datasets(config, seq_length=SEQ_LENGTH, seed=1, vocab_size=VOCAB_SIZE, eod_id=0, **sizes).train


def items(config: DataConfig, samples: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    train = train_set(config, samples)
    return [train[number] for number in range(samples)]


def assert_equal(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(np.asarray(one[name]), np.asarray(other[name])) for name in one)


# -- the same samples


@pytest.mark.parametrize("kind", ["planned", "http"])
@pytest.mark.parametrize("blend", BLENDS)
def test_samples_are_those_of_the_local_files(kind: str, blend: str, folder: Path, tmp_path: Path) -> None:
    here = items(config_of(folder, tmp_path / "cache", blend))
    with SERVED[kind](folder) as url:
        for _ in range(2):  # the second time indices and notes are there
            assert_equal(items(config_of(url, tmp_path / "cache", blend)), here)
    assert_equal(items(config_of(folder, tmp_path / "cache", blend)), here)


def test_folders_and_patterns_are_listed_in_the_order_of_local_ones(folder: Path, tmp_path: Path) -> None:
    def named(place: str, *words: str) -> list[str]:
        config = DataConfig(train_data=[word.format(place) for word in words], cache_path=str(tmp_path / "cache"))
        return [path.replace(place, "") for source in check_files(config).train.sources for path in source.paths]

    (folder / "deep").mkdir()
    write_npy(folder / "deep" / "three.npy", 100)
    write_npy(folder / "deep" / "part1.npy", 100)
    with planned(folder) as url:
        assert named(url, "{}/deep/part[0-9].npy") == ["/deep/part1.npy"]
        assert named(url, "{}/") == named(str(folder), "{}") == ["/one.npy", "/two.npy"]
        assert named(url, "{}/**/*.npy") == named(str(folder), "{}/**/*.npy")
        with pytest.raises(InputError, match=re.escape(f"{url}/none*.npy holds no .npy file")):
            named(url, "{}/none*.npy")


@pytest.mark.parametrize("kind", ["planned", "http"])
@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_come_in_the_local_order(kind: str, workers: int, folder: Path, tmp_path: Path) -> None:
    def drawn(place: Path | str, num_workers: int) -> list[dict[str, torch.Tensor]]:
        train = train_set(config_of(place, tmp_path / "cache", "mixed"))
        settings = {"consumed_samples": 3, "micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2}
        batches = micro_batches(train, **settings, num_workers=num_workers)
        taken = list(islice(batches, 7))
        batches.close()
        return taken

    here = drawn(folder, 0)
    with SERVED[kind](folder) as url:
        assert_equal(drawn(url, workers), here)


# -- the same identity


@pytest.mark.parametrize("blend", ["npy", "weights", "mixed"])
def test_the_identity_is_that_of_the_local_files(blend: str, folder: Path, tmp_path: Path) -> None:
    def identity(place: Path | str) -> Any:
        config = config_of(place, tmp_path / "cache", blend)
        return fingerprint_data(config, check_files(config, VOCAB_SIZE))

    (np.arange(1 << 20) % VOCAB_SIZE).astype("<u2").tofile(folder / "two.npy")  # beyond 32 blocks
    here = identity(folder)
    plan = Plan()
    with planned(folder, plan) as url:
        assert identity(url) == here
        before, plan.requests = plan.requests, 0
        assert identity(url) == here
        assert plan.requests < before
        if blend == "npy":
            assert plan.requests == 2 * 3, "look-up, beginning and manifest of each; blocks are remembered"


# -- faults


def test_faults_are_healed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store of which every third request fails."""
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 40)
    plan = Plan(0.3)
    with planned(folder, plan) as url:
        there = items(config_of(url, tmp_path / "there", "mixed"))
    assert plan.faults >= 10
    assert_equal(there, items(config_of(folder, tmp_path / "here", "mixed")))


def test_a_file_that_changes_during_a_run_is_an_error(folder: Path, tmp_path: Path) -> None:
    """Replaced by one of the same size, whose samples would look right; removed, it cannot be read."""
    with http_server(folder) as url:
        config = config_of(url, tmp_path / "cache")
        checked_data, train = check_files(config), train_set(config)
        checked_data.refuse_changed_files()
        write_npy(folder / "one.npy", 3000, seed=7)
        with pytest.raises(CorruptError, match=rf"{url}/one.npy is another file than when the run began; put it back"):
            checked_data.refuse_changed_files()
        for name in ("one.npy", "two.npy"):
            (folder / name).unlink()
        with pytest.raises(CorruptError, match=rf"{url}/(one|two).npy is no longer there; put it back and resume"):
            train[0]


def test_a_server_without_ranges_is_an_error_at_once(folder: Path, tmp_path: Path) -> None:
    with http_server(folder, serves_ranges=False) as url, pytest.raises(InputError, match="it does not serve ranges"):
        check_files(config_of(url, tmp_path / "cache"))


def test_a_store_that_stays_down_ends_the_run_with_one_line(folder: Path, tmp_path: Path) -> None:
    plan = Plan()
    with planned(folder, plan) as url:
        train = train_set(config_of(url, tmp_path / "cache"))
        plan._share = 1.0
        with pytest.raises(FanformerError, match="cannot be reached") as raised:
            train[1]
    assert type(raised.value) is FanformerError and raised.value.exit_code == 1
    assert url in str(raised.value) and "\n" not in str(raised.value)


def test_no_right_at_the_start_is_an_input_error_and_shows_no_secret(folder: Path, tmp_path: Path) -> None:
    plan = Plan(1.0, kinds=(FORBIDDEN,))
    with planned(folder, plan) as url, pytest.raises(InputError, match="check its name and rights"):
        check_files(config_of(url, tmp_path / "cache"))
    with planned(folder, Plan(1.0, kinds=(REFUSED,))) as url, pytest.raises(FanformerError) as raised:
        check_files(config_of(url, tmp_path / "cache"))
    assert "secret" not in str(raised.value) and "503 SlowDown: https://…@host" in str(raised.value)


@pytest.mark.parametrize(
    "word, line",
    [
        ("{}/none.npy", "none.npy does not exist; name .npy files of token ids"),
        ("{}/none", "none.bin does not exist; name the prefix of a .bin and .idx pair, or a folder, ending in /"),
    ],
)
def test_what_is_not_there_is_an_input_error(word: str, line: str, folder: Path, tmp_path: Path) -> None:
    with planned(folder) as url, pytest.raises(InputError, match=line):
        check_files(DataConfig(train_data=[word.format(url)], cache_path=str(tmp_path / "cache")))


def test_what_a_configuration_itself_shows_needs_no_store(tmp_path: Path) -> None:
    def problems(*words: str, **fields: Any) -> str:
        return "\n".join(DataConfig(train_data=list(words), **fields).problems())

    assert not problems("s3://bucket/a", "s3://bucket/b.npy", cache_path=str(tmp_path))
    assert "holds a password" in problems("s3://user:secret@bucket/a", cache_path=str(tmp_path))
    assert "secret" not in problems("s3://user:secret@bucket/a", cache_path=str(tmp_path))
    assert "is a chain of URLs" in problems("simplecache::s3://bucket/a", cache_path=str(tmp_path))
    assert "data.cache_path is null" in problems("s3://bucket/a")
    assert "where chats are not read" in problems("s3://bucket/a", format="sft")


@needs_server
def test_files_on_s3_are_read_in_their_version(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "REQUEST_SECONDS", 30.0)
    here = items(config_of(folder, tmp_path / "cache", "mixed"))
    with s3_server(tmp_path) as url:
        import s3fs

        s3fs.S3FileSystem().put(f"{folder}/", f"{url}/tokens/", recursive=True)
        assert_equal(items(config_of(f"{url}/tokens", tmp_path / "cache", "mixed")), here)
        listed = check_files(DataConfig(train_data=[f"{url}/tokens/"], cache_path=str(tmp_path / "cache")))
        assert [file.url for file in listed.remote_files] == [f"{url}/tokens/{name}.npy" for name in ("one", "two")]
        s3fs.S3FileSystem().put(str(folder / "first.bin"), f"{url}/tokens/one.npy")
        with pytest.raises(CorruptError, match=r"tokens/one.npy is another file than when the run began"):
            listed.refuse_changed_files()


# -- commands that read them


def test_perplexity_sets_are_those_of_the_local_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    def read(place: Path | str) -> list[list[int]]:
        sets = {"own": [f"{place}/one.npy", f"{place}/first"]}
        stated = {"seq_length": SEQ_LENGTH, "vocab_size": VOCAB_SIZE}
        (found,) = find_sets(PerplexityConfig(sets=sets), **stated)
        return [found.read(chunk).tolist() for chunk in found.chunks()]

    with planned(folder) as url:
        assert read(url) == read(folder)


def test_manifests_that_may_not_be_read_count_as_none(folder: Path) -> None:
    """A store that gives no right to list says of a file that is not there that there is no right to it."""
    with planned(folder, Plan(1.0, kinds=(FORBIDDEN,))) as url:
        assert read_manifest(f"{url}/one") is None
