"""Checkpoints that are copied to another store: what is there is whole or none, whatever fails.

Stores are folders here, by file:// or behind a filesystem that fails, and moto's S3 server where that is installed.
"""

import errno
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer import stores
from megatron_fanformer.checkpoint import mirror, run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST
from megatron_fanformer.checkpoint.mirror import Mirror
from megatron_fanformer.checkpoint.remote import RemoteRun
from megatron_fanformer.errors import CorruptError
from tests.checkpoint.stores import WEIGHTS, FailingFiles, save, step_names, there
from tests.faults.mirror_kills import needs_server, s3_server, verified

STORES = ["file", pytest.param("s3", marks=[pytest.mark.full, needs_server])]


@pytest.mark.parametrize("kind", STORES)
def test_a_copy_is_the_run_s_folder_again_and_the_newest_are_kept(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / run_folder.RECOVERY).write_text("{}\n")
    with s3_server(tmp_path) if kind == "s3" else nullcontext(f"file://{tmp_path}") as base:
        remote = RemoteRun(f"{base}/there")
        remote.copy(save(run, 9), keep=2)  # the run goes back
        stores.make_folder(remote._files, f"{remote._checkpoints}/step-00000002")
        remote._files.pipe_file(f"{remote._checkpoints}/step-00000002/{WEIGHTS}", b"a copy that was cut off")
        for step in (3, 4, 5):
            remote.copy(save(run, step), keep=2)
        assert remote._steps() == remote.complete() == step_names(4, 5, 9)
        assert remote.candidates() == step_names(5, 4)
        assert remote.fetch_record(run_folder.RECOVERY) == b"{}\n"
        for name in step_names(4, 5):
            copy = remote.fetch([name], tmp_path / "fetched", print)
            for file in (run / run_folder.CHECKPOINTS / name).iterdir():
                assert (copy / file.name).read_bytes() == file.read_bytes()
        assert verified(f"{base}/there", tmp_path / "fetched") == 3


@pytest.mark.parametrize("kind", ["refused", "cut off"])
def test_whatever_call_fails_nothing_looks_whole_that_is_not(kind: str, failing: str, tmp_path: Path) -> None:
    """Each call of a copy that replaces one of the same name, with other contents, and then removes the one before."""
    run, folder = tmp_path / "run", tmp_path / "there"
    before, replaced = save(run, 1), save(run, 2, b"of a run that was rewound")
    (run / run_folder.METRICS).write_text("one\n")
    for checkpoint in (before, replaced):
        RemoteRun(failing).copy(checkpoint, keep=None)
    shutil.copytree(folder, tmp_path / "as before")
    newest, failed = save(run, 2), 0
    FailingFiles.kind = kind
    for target in range(1, 1000):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "as before", folder)
        FailingFiles.count, FailingFiles.target = 0, target
        try:
            RemoteRun(failing).copy(newest, keep=1)
            assert there(folder) == step_names(2)
        except OSError:
            failed += 1
        manifest = folder / run_folder.CHECKPOINTS / newest.name / MANIFEST
        is_half = manifest.is_file() and not manifest.read_bytes().endswith(b"}\n")  # which readers notice
        assert is_half or there(folder)
        FailingFiles.target = 0
        RemoteRun(failing).copy(newest, keep=1)
        assert there(folder) == step_names(2)
        assert RemoteRun(failing).manifest_of(newest.name) == (newest / MANIFEST).read_bytes()
        if target > FailingFiles.count:
            break
    assert failed > 3


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_not_published(tmp_path: Path) -> None:
    """The run may save the same step again, after it went back."""
    checkpoint, remote = save(tmp_path / "run", 1), RemoteRun(f"file://{tmp_path}/there")
    put = remote._files.put

    def replaced_meanwhile(*arguments: Any, **named: Any) -> None:
        put(*arguments, **named)
        save(tmp_path / "run", 1, bytes(256))

    with mock.patch.object(remote._files, "put", replaced_meanwhile), pytest.raises(OSError, match="was replaced"):
        remote.copy(checkpoint, keep=None)
    assert there(tmp_path / "there") == []


def test_a_checkpoint_without_a_manifest_is_not_copied(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(CorruptError, match="has no manifest"):
        RemoteRun(f"file://{tmp_path}/there").copy(checkpoint, keep=None)


# -- the thread that copies


@pytest.fixture
def failures() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def made(failing: str, failures: list[tuple[str, str]]) -> Mirror:
    return Mirror(failing, keep=None, note_failure=lambda name, reason: failures.append((name, reason)))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every copy until it is set."""
    go_on, copy = threading.Event(), RemoteRun.copy

    def waiting(self: RemoteRun, *arguments: Any, **named: Any) -> None:
        go_on.wait()
        copy(self, *arguments, **named)

    monkeypatch.setattr(RemoteRun, "copy", waiting)
    yield go_on
    go_on.set()


def test_one_is_copied_at_a_time_and_the_newest_is_next(made: Mirror, held: threading.Event, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made.offer(save(tmp_path / "run", step))
    assert made.in_use == (run_folder.checkpoint_name(1),)
    held.set()
    made.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(1, 3)
    assert not made.in_use


def test_a_checkpoint_that_is_being_copied_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    in_use = save(run, 1)
    for step in (2, 3):
        folder = run_folder.temporary_folder(run / run_folder.CHECKPOINTS, step)
        run_folder.publish_checkpoint(folder, run / run_folder.CHECKPOINTS, step, {}, 1, in_use=(in_use.name,))
    assert [path.name for path in run_folder._steps(run / run_folder.CHECKPOINTS)] == step_names(1, 3)


def test_attempts_follow_one_another_at_growing_distances(
    made: Mirror, failures: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = [0.001 * number for number in range(6)]
    monkeypatch.setattr(stores.with_attempts, "__defaults__", (pauses, *stores.with_attempts.__defaults__[1:]))  # type: ignore[index]
    FailingFiles.target, FailingFiles.kind = 2, "refused"
    made.offer(save(tmp_path / "run", 1))
    made.finish(lambda: False)
    assert len(failures) == 1 and there(tmp_path / "there") == step_names(1)
    FailingFiles.target = -1
    made.offer(save(tmp_path / "run", 2))
    made.finish(lambda: False)
    assert [name for name, _ in failures] == step_names(1, *[2] * 7)
    assert "secret" not in failures[-1][1] and "the store does not answer" in failures[-1][1]
    assert not made.in_use


def test_a_store_that_is_full_is_tried_once(
    made: Mirror, failures: list[tuple[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(FailingFiles, "pipe_file", side_effect=full):
        made.offer(save(tmp_path / "run", 1))
        made.finish(lambda: False)
    assert len(failures) == 1
    assert "step-00000001 is not copied" in caplog.messages[-1]


@pytest.mark.parametrize("ending", ["enough", "seconds", "nothing moves"])
def test_the_end_of_a_run_does_not_wait_for_a_store_that_never_answers(
    ending: str,
    made: Mirror,
    held: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made.offer(save(tmp_path / "run", 1))
    if ending == "nothing moves":
        monkeypatch.setattr(mirror, "FINISH_SECONDS", 0.2)
    made.finish(lambda: ending == "enough", 0.2 if ending == "seconds" else float("inf"))
    assert made.in_use == (run_folder.checkpoint_name(1),)
    assert "step-00000001 is not copied" in caplog.messages[-1]
