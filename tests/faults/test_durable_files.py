"""Files that are written: what stands in their way, what reaches the disk before the name, what a failure leaves."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer import durable_files
from megatron_fanformer.durable_files import (
    file_problems,
    naming,
    new_folder,
    sync,
    take_lock,
    temporary_name,
    write_atomically,
)
from tests.disk_steps import recorded_steps


def test_what_a_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    left = temporary_name(tmp_path / "out")
    left.mkdir()
    (left / "old").touch()
    with new_folder(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_a_folder_gets_its_name_once_all_in_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = recorded_steps(monkeypatch)
    with new_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "deep").touch()
        (folder / "flat").touch()
    before = steps[: steps.index(("rename", "out"))]
    assert set(before) == {("fsync", name) for name in ("deep", "flat", "inner", temporary_name(tmp_path / "out").name)}
    assert steps[len(before) :] == [("rename", "out"), ("fsync", tmp_path.name)]


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "out") as folder:
        (folder / "half").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []

    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(durable_files, "publish", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "latest", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_that_of_the_file_which_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who held it before may remove it, and another make it anew, between the opening and the locking."""
    path, lock = tmp_path / "lock", fcntl.flock
    replaced: list[bool] = []

    def late(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(True)
            path.unlink()
            path.touch()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    descriptor = take_lock(path, wait=True)
    assert descriptor is not None and os.path.samestat(os.fstat(descriptor), path.stat())
    assert take_lock(path, wait=False) is None


def test_files_that_a_command_could_not_write_are_named_by_their_options(tmp_path: Path) -> None:
    assert file_problems(report=tmp_path / "new", output=None) == []
    found = file_problems(report=tmp_path, output=tmp_path / "none" / "new")
    assert [line.split()[0] for line in found] == ["--report", "--output"]


def test_a_file_that_the_disk_did_not_take_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error of fsync has no path, which the command's line would then lack."""
    file = tmp_path / "file"
    file.write_bytes(b"content")

    def stale(descriptor: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fsync", stale)
    with pytest.raises(OSError, match="Stale") as caught:
        sync(file)
    assert caught.value.filename == str(file)
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path):
        sync(tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
