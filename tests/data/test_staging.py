"""Copies of token files on other stores: whole or not there, once for a node."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data import remote_files, staging
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import build_datasets
from megatron_fanformer.data.identity import identify_data
from megatron_fanformer.data.survey import DataSurvey, survey_data
from megatron_fanformer.errors import InputError
from tests.data.failing_stores import Plan, planned
from tests.data.test_remote_files import assert_equal, config_of, folder, items
from tests.data.token_making import VOCAB_SIZE, write_manifest, write_npy

__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 40)


def surveyed(place: str, tmp_path: Path, blend: str = "mixed", **fields: Any) -> tuple[DataConfig, DataSurvey]:
    stated = {"staging_path": str(tmp_path / "copies"), **fields}
    config = config_of(place, tmp_path / "cache", blend, **stated)
    return config, survey_data(config, VOCAB_SIZE, for_run=True)


def copies(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "copies").glob("[!.]*/[!.]*"))


@pytest.mark.parametrize("blend", ["npy", "weights", "mixed", "blend"])
def test_samples_and_identity_are_those_of_the_local_files(blend: str, folder: Path, tmp_path: Path) -> None:
    local = config_of(folder, tmp_path / "cache", blend)
    wanted = identify_data(local, survey_data(local, VOCAB_SIZE))
    plan = Plan(0.2, seed=3)
    with planned(folder, plan) as url:
        config, survey = surveyed(url, tmp_path, blend)
        sizes = {"seq_length": 64, "train_samples": 40, "valid_samples": 4, "seed": 1}
        built = build_datasets(config, **sizes, vocab_size=VOCAB_SIZE, eod_id=0, survey=survey)
        assert_equal([built.train[number] for number in range(40)], items(local))
        found = identify_data(config, survey)
    assert found == wanted and plan.faults


def test_what_is_there_is_not_copied_again(folder: Path, tmp_path: Path) -> None:
    plan = Plan()
    with planned(folder, plan) as url:
        surveyed(url, tmp_path)
        assert copies(tmp_path) == ["first.bin", "first.idx", "first.manifest.json", "one.manifest.json", "one.npy"]
        plan.requests = 0
        surveyed(url, tmp_path)
        assert plan.requests == 3 + 2, "a look-up of each file, and its manifest"


def test_copies_that_were_cut_off_are_made_good(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of the second file; what is whole by then is not requested again."""
    monkeypatch.setattr(staging, "THREADS", 1)
    copied: list[str] = []

    def stopped(file: remote_files.RemoteFile, path: Path) -> None:
        copied.append(path.name)
        if len(copied) == 2:
            raise KeyboardInterrupt
        remote_files.copy_to(file, path)

    with planned(folder) as url:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "copy_to", stopped)
            with pytest.raises(KeyboardInterrupt):
                surveyed(url, tmp_path)
        assert not list((tmp_path / "copies").glob(f"*/{copied[1]}"))
        surveyed(url, tmp_path)
        for name in ("first.bin", "first.idx", "one.npy"):
            (copy,) = (tmp_path / "copies").glob(f"*/{name}")
            assert copy.read_bytes() == (folder / name).read_bytes()


def test_a_disk_without_room_is_an_input_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with planned(folder) as url, pytest.raises(InputError, match="room for 1 bytes, and the run's token files need"):
        surveyed(url, tmp_path)
    assert not copies(tmp_path)


def test_a_new_version_is_another_copy(folder: Path, tmp_path: Path) -> None:
    with planned(folder) as url:
        surveyed(url, tmp_path, "npy")
        write_npy(folder / "one.npy", 3000, seed=9)
        write_manifest(str(folder / "one"), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
        _, survey = surveyed(url, tmp_path, "npy")
        path = Path(survey.train.sources[0].paths[0])
        assert path.name == "one.npy" and path.read_bytes() == (folder / "one.npy").read_bytes()
