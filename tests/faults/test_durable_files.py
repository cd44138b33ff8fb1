"""Files that are written: what stands in their way, what reaches the disk before the name, what a failure leaves."""

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
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
    write_refusal,
)
from megatron_fanformer.errors import FanformerError
from tests.disk_steps import recorded_steps
from tests.faults.hostile_files import pipe


def test_the_target_of_a_link_under_the_temporary_name_is_not_written(tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "latest"
    target.write_text("mine")
    temporary_name(file).symlink_to(target)
    write_atomically(file, "new")
    assert (target.read_text(), file.read_text(), file.is_symlink()) == ("mine", "new", False)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor is /dev/null, which root could."""
    pipe(tmp_path / "report")
    with pytest.raises(OSError, match="it is a pipe"):
        write_atomically(tmp_path / "report", "new")
    assert (tmp_path / "report").is_fifo() and len(list(tmp_path.iterdir())) == 1


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


def test_a_full_disk_is_named_whatever_the_error_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer notices a full disk by a position, and safetensors' by an error without a path."""
    with pytest.raises(KeyError), new_folder(tmp_path / "out"):
        raise KeyError  # where the disk has space
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="No space left") as caught, new_folder(tmp_path / "out"):
        raise KeyError
    with pytest.raises(FanformerError, match="its own"), new_folder(tmp_path / "out"):
        raise FanformerError("its own")
    assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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


def test_a_full_disk_is_refused_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the nearest folder that exists; any other refusal has no such figure."""
    asked: list[Path] = []

    def usage(folder: Path) -> Any:
        asked.append(folder)
        return SimpleNamespace(free=12_300_000)

    monkeypatch.setattr(durable_files.shutil, "disk_usage", usage)
    full = OSError(errno.ENOSPC, "No space left on device")
    assert write_refusal(full, tmp_path / "to" / "come") == "No space left on device, 0.012 GB free"
    assert write_refusal(PermissionError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"
    assert asked == [tmp_path]
