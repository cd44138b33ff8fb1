"""Copies of token files on other stores: whole or not there, once for a node, and room made of what nobody uses."""

import logging
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data import remote_files, remote_stores, staging
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import build_datasets
from megatron_fanformer.data.identity import identify_data
from megatron_fanformer.data.survey import DataSurvey, survey_data
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from tests.data.failing_stores import FORBIDDEN, Plan, planned
from tests.data.test_remote_files import assert_equal, config_of, folder, items
from tests.data.token_making import VOCAB_SIZE, write_manifest, write_npy

__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stores, "_stores", {})
    monkeypatch.setattr(remote_stores, "PAUSES_SECONDS", (0.01,) * 40)


@pytest.fixture(autouse=True)
def uses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The uses of this process, which each test begins without."""
    held: dict[str, int] = {}
    monkeypatch.setattr(staging, "_uses", held)
    return held


def end(uses: dict[str, int]) -> None:
    """Let go of what is in use, as a process does that ends."""
    for lock in uses.values():
        os.close(lock)
    uses.clear()


def surveyed(place: str, tmp_path: Path, blend: str = "mixed", **fields: Any) -> tuple[DataConfig, DataSurvey]:
    stated = {"remote": "staged", "staging_path": str(tmp_path / "copies"), **fields}
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
    assert [(file.content, file.form, file.sha256) for file in found.train.files] == [
        (file.content, file.form, file.sha256) for file in wanted.train.files
    ]
    named = [file.path.replace(str(folder), url) for file in wanted.train.files]
    assert [file.path for file in found.train.files] == named  # and not where the copies are
    assert plan.faults


def test_what_is_there_is_not_copied_again(folder: Path, tmp_path: Path) -> None:
    plan = Plan()
    with planned(folder, plan) as url:
        surveyed(url, tmp_path)
        assert copies(tmp_path) == ["first.bin", "first.idx", "first.manifest.json", "one.manifest.json", "one.npy"]
        plan.requests = 0
        surveyed(url, tmp_path)
        assert plan.requests == 3 + 2, "a look-up of each file, and its manifest"


def test_processes_of_a_node_copy_once(folder: Path, tmp_path: Path) -> None:
    plan = Plan()
    with planned(folder, plan) as url:
        _, survey = surveyed(url, tmp_path)
        shutil.rmtree(tmp_path / "copies")
        plan.requests = 0
        assert survey.staging is not None
        survey.staging.fill()
        once, plan.requests = plan.requests, 0
        shutil.rmtree(tmp_path / "copies")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: survey.staging and survey.staging.fill(), range(4)))
        assert plan.requests == once


@pytest.mark.parametrize("stop", range(1, 4))
def test_copies_that_were_cut_off_are_made_good(
    stop: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of each file; what is whole by then is not requested again."""
    monkeypatch.setattr(staging, "THREADS", 1)
    read, reads = remote_files.read_ranges, list[str]()

    def stopped(ranges: Any) -> Any:
        reads.append(ranges[0].file.url)
        if len(reads) == stop:
            raise KeyboardInterrupt
        return read(ranges)

    with planned(folder) as url:
        with monkeypatch.context() as patch:
            patch.setattr(remote_files, "read_ranges", stopped)
            with pytest.raises(KeyboardInterrupt):
                surveyed(url, tmp_path)
        assert len([name for name in copies(tmp_path) if not name.endswith(".json")]) == stop - 1
        for entry in (tmp_path / "copies").glob("[!.]*"):
            (entry / ".first.bin.1.tmp").write_text("of a process that was killed")
        surveyed(url, tmp_path)
        assert not list((tmp_path / "copies").glob("[!.]*/.*"))
        assert all(
            (folder / name).read_bytes() == next((tmp_path / "copies").glob(f"*/{name}")).read_bytes()
            for name in ("first.bin", "first.idx", "one.npy")
        )


def test_a_copy_that_its_manifest_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    manifest = (folder / "one.manifest.json").read_text()
    (folder / "one.manifest.json").write_text(manifest.replace('"sha256": ""', '"sha256": "' + 64 * "0" + '"'))
    with planned(folder) as url, pytest.raises(CorruptError, match=r"one.npy has another SHA-256 than its manifest"):
        surveyed(url, tmp_path)
    assert "one.npy" not in copies(tmp_path)


def test_room_is_made_of_what_no_process_uses(
    folder: Path, tmp_path: Path, uses: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        write_npy(folder / f"{name}.npy", 5000)  # 10,000 bytes

    def stage(name: str, **fields: Any) -> Any:
        stated = {"remote": "staged", "staging_path": str(tmp_path / "copies"), "staging_bytes": 25_000, **fields}
        config = DataConfig(train_data=[f"{url}/{name}.npy"], cache_path=str(tmp_path / "cache"), **stated)
        return survey_data(config, VOCAB_SIZE, for_run=True)

    with planned(folder) as url:
        stage("a")
        in_use = dict(uses)
        uses.clear()
        stage("b")
        end(uses)
        for path in (tmp_path / "copies").glob("*/a.npy"):
            os.utime(path.parent, (1, 1))  # the least recently used, and in use
        stage("c")
        assert copies(tmp_path) == ["a.npy", "c.npy"]
        with pytest.raises(InputError, match=r"data.staging_bytes is 25000, and .* beside 20000 that others use; "):
            stage("b")
        with caplog.at_level(logging.INFO):
            assert stage("b", remote="auto").staging is None
        assert "read there by ranges, not copied: data.staging_bytes is 25000" in caplog.text
        end(uses)
        end(in_use)
        stage("b")
        assert copies(tmp_path) == ["b.npy", "c.npy"]


def test_what_else_is_in_the_folder_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a folder of theirs loses nothing of it, though there be no room."""
    mine = tmp_path / "copies" / "mine"
    mine.mkdir(parents=True)
    (mine / "precious").write_bytes(bytes(10_000))
    (mine / ".left.tmp").touch()
    os.utime(mine, (1, 1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with planned(folder) as url, pytest.raises(InputError, match="has room for 1 bytes"):
        surveyed(url, tmp_path)
    monkeypatch.undo()
    with planned(folder) as url:
        surveyed(url, tmp_path)
    assert sorted(path.name for path in mine.iterdir()) == [".left.tmp", "precious"]


def test_the_manifest_beside_a_copy_is_the_stores(folder: Path, tmp_path: Path, uses: dict[str, int]) -> None:
    """One that was lost, or changed there since: it says of which type the ids are."""
    with planned(folder) as url:
        surveyed(url, tmp_path)
        (copy,) = (tmp_path / "copies").glob("*/one.manifest.json")
        for content in (None, b"torn"):
            end(uses)
            copy.unlink() if content is None else copy.write_bytes(content)
            surveyed(url, tmp_path)
            assert copy.read_bytes() == (folder / "one.manifest.json").read_bytes()
        end(uses)
        (folder / "one.manifest.json").unlink()
        surveyed(url, tmp_path)
        assert not copy.exists()


def test_a_disk_without_room_is_an_input_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with (
        planned(folder) as url,
        pytest.raises(InputError, match="has room for 1 bytes, and the run's token files have"),
    ):
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


def test_a_store_that_ends_to_serve_ends_the_start(folder: Path, tmp_path: Path) -> None:
    plan = Plan(1.0, kinds=(FORBIDDEN,), first=6)
    with planned(folder, plan) as url, pytest.raises(FanformerError, match="renew its credentials, and start again"):
        surveyed(url, tmp_path)


def test_without_a_folder_it_is_refused_before_anything_is_looked_up(tmp_path: Path) -> None:
    (problem,) = config_of("s3://bucket", tmp_path, remote="staged").problems()
    assert problem.startswith("data.remote: staged, and data.staging_path is null")
