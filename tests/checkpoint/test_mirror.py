"""Checkpoints that are copied to another store: what is there is whole or none, whatever fails.

Stores are folders here, by file:// or behind a filesystem that fails, and moto's S3 server where that is installed.
"""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer import stores
from megatron_fanformer.checkpoint import mirror, store
from megatron_fanformer.checkpoint.manifest import MANIFEST, read_manifest
from megatron_fanformer.checkpoint.mirror import Mirror, UploadStatus
from megatron_fanformer.checkpoint.remote import RemoteRun
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.processes import STOP_SIGNALS
from tests.checkpoint.stores import WEIGHTS, FailingFiles, save, step_names, there, told_of_copy
from tests.faults.mirror_kills import needs_server, s3_server, verified

KILLS = 6


# -- copies


def test_a_copy_is_the_run_s_folder_again_and_the_newest_are_kept(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/there"
    run.mkdir()
    (run / store.RECOVERY).write_text("{}\n")
    rewound = save(run, 9)
    RemoteRun(url).copy(rewound, keep=2)
    cut_off = tmp_path / "there" / store.CHECKPOINTS / "step-00000002"
    cut_off.mkdir()
    (cut_off / WEIGHTS).touch()
    for step in (3, 4, 5):
        RemoteRun(url).copy(save(run, step), keep=2)
    copy = tmp_path / "there" / store.CHECKPOINTS
    assert sorted(path.name for path in copy.iterdir()) == ["latest", *step_names(4, 5, 9)]
    for name in step_names(4, 5):
        files = sorted((run / store.CHECKPOINTS / name).iterdir())
        assert [path.name for path in files] == sorted(path.name for path in (copy / name).iterdir())
        assert all((copy / name / path.name).read_bytes() == path.read_bytes() for path in files)
    assert RemoteRun(url).candidates() == step_names(5, 4)
    assert (tmp_path / "there" / store.RECOVERY).read_text() == "{}\n"


@pytest.mark.parametrize("kind", ["refused", "cut off", "changed"])
def test_whatever_call_fails_nothing_looks_whole_that_is_not(kind: str, failing: str, tmp_path: Path) -> None:
    """Each call of a copy that replaces one of the same name, with other contents, and then removes the one before."""
    run, folder = tmp_path / "run", tmp_path / "there"
    before, replaced = save(run, 1), save(run, 2, b"of a run that was rewound")
    (run / store.METRICS).write_text("one\n" * 1000)
    for checkpoint in (before, replaced):
        RemoteRun(failing).copy(checkpoint, keep=None)
    (run / store.METRICS).write_text("one\n" * 1001)
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
        FailingFiles.target = 0
        assert there(folder)
        assert (folder / store.METRICS).read_text() in ("one\n" * 1000, "one\n" * 1001)
        RemoteRun(failing).copy(newest, keep=1)
        assert there(folder) == step_names(2)
        assert RemoteRun(failing).holds(newest.name, (newest / MANIFEST).read_bytes())
        if target > FailingFiles.count:
            break
    assert failed > 3


def test_a_good_one_is_not_removed_because_the_store_did_not_answer(failing: str, tmp_path: Path) -> None:
    """`exists` of fsspec's base takes a failure for a no."""
    run = tmp_path / "run"
    RemoteRun(failing).copy(save(run, 1), keep=None)
    newest = save(run, 2)
    for target in range(1, 1000):
        FailingFiles.count, FailingFiles.target = 0, target
        with suppress(TimeoutError):
            RemoteRun(failing).copy(newest, keep=None)
        assert there(tmp_path / "there")[0] == store.checkpoint_name(1)
        if target > FailingFiles.count:
            break
    assert FailingFiles.count > 5


def test_a_sign_of_life_comes_with_every_part_and_every_file_removed(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "READ_BYTES", 1 << 10)
    calls = [0]
    silent = 0  # most calls to the store between two signs of life

    def advance() -> None:
        nonlocal silent
        silent, calls[0] = max(silent, FailingFiles.count - calls[0]), FailingFiles.count

    first = store.temporary_folder(tmp_path / "run" / store.CHECKPOINTS, 1)
    for number in range(50):
        (first / f"__0_{number}.distcp").touch()
    (first / store.MEGATRON_METADATA).write_text("{}")
    RemoteRun(failing).copy(store.publish_checkpoint(first, tmp_path / "run" / store.CHECKPOINTS, 1, {}), keep=1)
    newest = save(tmp_path / "run", 2, bytes(20 << 10))
    FailingFiles.count, signs = 0, list[int]()
    RemoteRun(failing).copy(newest, keep=1, advance=lambda: (advance(), signs.append(0)))  # type: ignore[arg-type]
    assert there(tmp_path / "there") == step_names(2)
    assert len(signs) > 2 * 20 + 50, "sent, read back, and removed"
    assert silent < 20


def test_an_attempt_goes_on_where_the_one_before_failed(
    failing: str, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, sent = save(tmp_path / "run", 1), list[str]()
    send = RemoteRun._send

    def noted(self: RemoteRun, file: Path, *arguments: Any) -> None:
        sent.append(file.name)
        if file.name == store.CONFIG and sent.count(file.name) < 3:
            raise TimeoutError("the store does not answer")
        send(self, file, *arguments)

    monkeypatch.setattr(RemoteRun, "_send", noted)
    assert [event.what for event in told_of_copy(failing, checkpoint)] == ["failed", "failed", "copied"]
    assert there(tmp_path / "there") == step_names(1)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert {name: sent.count(name) for name in manifest.files} == {
        name: 3 if name == store.CONFIG else 1 for name in manifest.files
    }


def test_the_manifest_that_was_verified_is_the_one_that_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may save the same step again, after it went back, while the first is being copied."""
    checkpoint, url = save(tmp_path / "run", 1), f"file://{tmp_path}/there"
    copy_files = RemoteRun._copy_files

    def replaced_meanwhile(self: RemoteRun, *arguments: Any) -> None:
        copy_files(self, *arguments)
        save(tmp_path / "run", 1, b"of a run that was rewound")

    monkeypatch.setattr(RemoteRun, "_copy_files", replaced_meanwhile)
    RemoteRun(url).copy(checkpoint, keep=None)
    assert there(tmp_path / "there") == step_names(1)


def test_a_damaged_original_is_not_published(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / WEIGHTS).write_bytes(bytes(256))
    with pytest.raises(CorruptError, match=str(checkpoint / WEIGHTS)):
        RemoteRun(f"file://{tmp_path}/there").copy(checkpoint, keep=None)
    assert there(tmp_path / "there") == []


def test_attempts_follow_one_another_at_growing_distances(failing: str, tmp_path: Path, pauses: list[float]) -> None:
    FailingFiles.target, FailingFiles.kind = 2, "refused"
    assert [event.what for event in told_of_copy(failing, save(tmp_path / "run", 1))] == ["failed", "copied"]
    FailingFiles.target = -1
    pauses.clear()
    *failed, last = told_of_copy(failing, save(tmp_path / "run", 2))
    assert [event.what for event in (*failed, last)] == ["failed"] * 7 + ["given up"]
    assert pauses == list(stores.PAUSES_SECONDS)
    assert "secret" not in last.reason and "the store does not answer" in last.reason


def test_a_store_that_is_full_is_tried_once(failing: str, tmp_path: Path, pauses: list[float]) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(FailingFiles, "pipe_file", side_effect=full):
        events = told_of_copy(failing, save(tmp_path / "run", 1))
    assert [event.what for event in events] == ["failed", "given up"] and pauses == []


# -- the process that copies


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[tuple[Mirror, list[str]]]:
    """A mirror, and the names of the checkpoints that it failed to copy."""
    failed: list[str] = []
    made = Mirror(f"file://{tmp_path}/there", keep=None, note_failure=lambda name, _: failed.append(name))
    yield made, failed
    made.close()


def begin(made: Mirror, tmp_path: Path, number: int) -> None:
    """Offer a first checkpoint, and send its process a signal."""
    made.offer(save(tmp_path / "run", 1))
    assert made._process is not None and made._process.pid is not None
    os.kill(made._process.pid, number)


def go_on(made: Mirror, tmp_path: Path) -> list[str]:
    """Offer a second checkpoint, and wait for it; the copies that there are then."""
    made.offer(save(tmp_path / "run", 2))
    made.finish(lambda: False)
    return there(tmp_path / "there")


def test_one_is_copied_at_a_time_and_the_newest_is_next(mirrored: tuple[Mirror, list[str]], tmp_path: Path) -> None:
    made, failed = mirrored
    for step in (1, 2, 3):  # before its process has begun
        made.offer(save(tmp_path / "run", step))
    assert made.in_use == (store.checkpoint_name(1),)
    made.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(1, 3)
    assert not failed and not made.in_use


def test_a_checkpoint_is_spared_until_the_last_attempt_to_copy_it(
    mirrored: tuple[Mirror, list[str]], tmp_path: Path
) -> None:
    made, failed = mirrored
    name = store.checkpoint_name(1)
    made.offer(save(tmp_path / "run", 1))
    made._note(UploadStatus("failed", name, reason="the store does not answer", attempt=1))
    assert failed == [name] and made.in_use == (name,)
    made._note(UploadStatus("given up", name, reason="the store does not answer"))
    assert failed == [name, name] and made.in_use == ()


def test_a_checkpoint_that_is_being_copied_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    in_use = save(run, 1)
    for step in (2, 3):
        folder = store.temporary_folder(run / store.CHECKPOINTS, step)
        store.publish_checkpoint(folder, run / store.CHECKPOINTS, step, {}, 1, in_use=(in_use.name,))
    assert [path.name for path in store._steps(run / store.CHECKPOINTS)] == step_names(1, 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_told_and_replaced(
    number: signal.Signals,
    mirrored: tuple[Mirror, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, failed = mirrored
    begin(made, tmp_path, number)
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "STALLED_SECONDS", 0.3)
        made.finish(lambda: False)
    assert failed == step_names(1)
    assert "step-00000001 is not copied" in caplog.messages[-1]
    assert go_on(made, tmp_path) == step_names(2)


def test_a_process_that_is_killed_while_it_is_idle_has_failed_at_nothing(
    mirrored: tuple[Mirror, list[str]], tmp_path: Path
) -> None:
    made, failed = mirrored
    made.offer(save(tmp_path / "run", 1))
    made.finish(lambda: False)
    assert made._process is not None
    made._process.kill()
    made._process.join()
    made.poll()
    assert not failed
    assert go_on(made, tmp_path) == step_names(1, 2)


def test_a_process_that_cannot_be_started_is_told(
    mirrored: tuple[Mirror, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, failed = mirrored
    held = list[set[Any]]()

    def refused(_self: Any) -> None:
        held.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.context.SpawnProcess.start", refused)
        made.offer(save(tmp_path / "run", 1))
        made.finish(lambda: False)
    assert failed == step_names(1) and not made.in_use
    assert held[0].issuperset(STOP_SIGNALS) and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert go_on(made, tmp_path) == step_names(2)


STORES = ["file", pytest.param("s3", marks=[pytest.mark.full, needs_server])]


@pytest.mark.parametrize("kind", STORES)
def test_a_copy_that_is_killed_at_any_moment_is_none(kind: str, tmp_path: Path) -> None:
    def copied(step: int, seconds: float) -> float:
        """Copy a checkpoint, for so long at most; returns the seconds that it took."""
        made = Mirror(f"{base}/there", keep=2, note_failure=failed.append)
        started = time.monotonic()
        made.offer(save(tmp_path / "run", step, chance.randbytes(1 << 22)))
        made.finish(lambda: False, seconds)
        made.close()  # kills it
        return time.monotonic() - started

    chance, failed = random.Random(14), list[Any]()
    with s3_server(tmp_path) if kind == "s3" else nullcontext(f"file://{tmp_path}") as base:
        remote, cut_off = RemoteRun(f"{base}/there"), 0
        too_soon, too_late = 0.0, copied(1, float("inf"))
        for step in range(2, 2 + KILLS):  # ever nearer to a copy's end, whatever the first one's start took
            moment = (too_soon + too_late) / 2
            copied(step, moment)
            if remote.candidates()[0] == store.checkpoint_name(step):
                too_late = moment
            else:
                too_soon, cut_off = moment, cut_off + 1
            # Two are kept, and a third one between a copy's publication and the removal of the oldest.
            assert verified(f"{base}/there", tmp_path / "fetched") in (1, 2, 3)
        copied(99, float("inf"))
        assert remote.candidates()[0] == store.checkpoint_name(99)
        assert len(remote._steps()) <= 2, "what was cut off is removed"
    assert cut_off and not failed


def test_the_end_of_a_run_waits_for_parts_and_not_for_attempts(
    mirrored: tuple[Mirror, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, _ = mirrored
    begin(made, tmp_path, signal.SIGSTOP)  # its store never answers
    monkeypatch.setattr(mirror, "FINISH_SECONDS", 0.2)
    made.finish(lambda: False)
    assert made._copying is not None
    assert "step-00000001 is not copied" in caplog.messages[-1]


def test_a_copy_never_outlives_its_run_s_patience(mirrored: tuple[Mirror, list[str]], tmp_path: Path) -> None:
    made, failed = mirrored
    begin(made, tmp_path, signal.SIGSTOP)  # a copy that never ends
    made.finish(lambda: True)
    assert made._copying is not None and not failed
