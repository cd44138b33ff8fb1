"""Checkpoints on another store: what is there is whole or none, whatever fails, and what comes from there is checked.

Stores are folders here, by file:// or behind a filesystem that fails, and moto's S3 server where that is installed.
"""

import os
import random
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from megatron_fanformer.checkpoint import mirror, remote, store
from megatron_fanformer.checkpoint.config import CheckpointConfig
from megatron_fanformer.checkpoint.manifest import MANIFEST, FileSums, check_files, read_manifest
from megatron_fanformer.checkpoint.mirror import Mirror, Told, fetch_newer
from megatron_fanformer.checkpoint.remote import RemoteRun, fetched
from megatron_fanformer.errors import CorruptError, FanformerError, InputError, redacted
from tests.faults.mirror_kills import needs_server, s3_server, verified

WEIGHTS = "__0_0.distcp"
KILLS = 4


class FailingFiles(LocalFileSystem):
    """A store whose `target`-th call fails; 0: none, −1: all."""

    protocol = "failing"
    cachable = False
    target, count, kind = 0, 0, "refused"

    def _is_due(self) -> bool:
        FailingFiles.count += 1
        return FailingFiles.target in (-1, FailingFiles.count)

    def _fail_if_due(self) -> None:
        if self._is_due():
            raise TimeoutError("the store does not answer: store://user:secret@host")

    def put_file(self, path1: str, path2: str, callback: Any = None, **named: Any) -> None:
        is_due = self._is_due()
        if is_due and self.kind == "refused":
            raise TimeoutError("the store does not answer")
        super().put_file(path1, path2, **named)
        if is_due:
            content = Path(path2).read_bytes()
            damaged = content[: len(content) // 2] if self.kind == "cut off" else b"\xee" + content[1:]
            Path(path2).write_bytes(damaged)
            if self.kind == "cut off":
                raise TimeoutError("the connection was lost")

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        is_due = self._is_due()
        if is_due and self.kind == "refused":
            raise TimeoutError("the store does not answer")
        if is_due and self.kind == "changed":
            value = b"\xee" + value[1:]
        elif is_due:
            value = value[: len(value) // 2]
        super().pipe_file(path, value)
        if is_due and self.kind == "cut off":
            raise TimeoutError("the connection was lost")

    def mkdir(self, path: str, create_parents: bool = True, **named: Any) -> None:
        self._fail_if_due()
        super().mkdir(path, create_parents, **named)

    def mv(self, path1: str, path2: str, recursive: bool = True, **named: Any) -> None:
        self._fail_if_due()
        super().mv(path1, path2, recursive, **named)

    def rm_file(self, path: str) -> None:
        self._fail_if_due()
        super().rm_file(path)

    def ls(self, path: str, detail: bool = False, **named: Any) -> Any:
        self._fail_if_due()
        return super().ls(path, detail, **named)

    def open(self, path: str, *arguments: Any, **named: Any) -> Any:
        self._fail_if_due()
        return super().open(path, *arguments, **named)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).replace("failing://", "file://"))


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[str]:
    """The URL of a store that fails as `FailingFiles` is told."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    FailingFiles.target = FailingFiles.count = 0
    yield f"failing://{tmp_path}/there"
    FailingFiles.target = 0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited before further attempts."""
    waited: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    return waited


def save(run: Path, step: int, content: bytes = b"") -> Path:
    """A checkpoint as far as copies are concerned."""
    folder = store.temporary_folder(run / store.CHECKPOINTS, step)
    (folder / WEIGHTS).write_bytes(content or bytes(range(256)) * step)
    (folder / "empty.distcp").touch()
    (folder / store.MEGATRON_METADATA).write_text("{}")
    return store.publish_checkpoint(folder, run / store.CHECKPOINTS, step, {"step": step})


def there(folder: Path) -> list[str]:
    """The complete checkpoints in a store's folder, each of which is found sound."""
    names = sorted(path.parent.name for path in folder.glob(f"{store.CHECKPOINTS}/step-*/{MANIFEST}"))
    for name in names:
        checkpoint = folder / store.CHECKPOINTS / name
        manifest = read_manifest(checkpoint)
        assert manifest is not None
        check_files(checkpoint, manifest)
    return names


def step_names(*steps: int) -> list[str]:
    return [store.checkpoint_name(step) for step in steps]


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
        FailingFiles.target = 0
        assert there(folder)
        RemoteRun(failing).copy(newest, keep=1)
        assert there(folder) == step_names(2)
        assert RemoteRun(failing).holds(newest)
        if target > FailingFiles.count:
            break
    assert failed > 3


def test_a_damaged_original_is_not_published(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / WEIGHTS).write_bytes(bytes(256))
    with pytest.raises(CorruptError, match=str(checkpoint / WEIGHTS)):
        RemoteRun(f"file://{tmp_path}/there").copy(checkpoint, keep=None)
    assert there(tmp_path / "there") == []


def test_no_folder_is_made_for_the_mirror_s_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # a disk that is not mounted
        RemoteRun(f"file://{tmp_path}/disk/run").make_ready()


class Heard:
    """Stands for the connection of the copying process."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def send(self, told: Told) -> None:
        self.told.append(told)


def test_attempts_follow_one_another_at_growing_distances(failing: str, tmp_path: Path, pauses: list[float]) -> None:
    checkpoint, heard = save(tmp_path / "run", 1), Heard()
    FailingFiles.target, FailingFiles.kind = 3, "refused"
    mirror._copy(failing, None, checkpoint, heard)  # type: ignore[arg-type]
    assert [told.what for told in heard.told] == ["failed", "copied"]
    FailingFiles.target, heard.told = -1, []
    pauses.clear()
    mirror._copy(failing, None, save(tmp_path / "run", 2), heard)  # type: ignore[arg-type]
    assert [told.what for told in heard.told] == ["failed"] * 7 + ["given up"]
    assert pauses == list(remote.PAUSES_SECONDS)
    assert "secret" not in heard.told[-1].reason and "the store does not answer" in heard.told[-1].reason


# -- the process that copies


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[tuple[Mirror, list[str]]]:
    """A mirror, and the names of the checkpoints that it failed to copy."""
    failed: list[str] = []
    made = Mirror(f"file://{tmp_path}/there", keep=None, note_failure=lambda name, _: failed.append(name))
    yield made, failed
    made.close()


def test_one_is_copied_at_a_time_and_the_newest_is_next(mirrored: tuple[Mirror, list[str]], tmp_path: Path) -> None:
    made, failed = mirrored
    for step in (1, 2, 3):  # before its process has begun
        made.offer(save(tmp_path / "run", step))
    assert made.spared == (store.checkpoint_name(1),)
    made.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(1, 3)
    assert not failed and not made.spared


def test_a_checkpoint_that_is_being_copied_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    spared = save(run, 1)
    for step in (2, 3):
        folder = store.temporary_folder(run / store.CHECKPOINTS, step)
        store.publish_checkpoint(folder, run / store.CHECKPOINTS, step, {}, 1, spared=(spared.name,))
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
    made.offer(save(tmp_path / "run", 1))
    assert made._process is not None and made._process.pid is not None
    os.kill(made._process.pid, number)
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "STALLED_SECONDS", 0.3)
        made.finish(lambda: False)
    assert failed == step_names(1)
    assert "step-00000001 is not copied" in caplog.messages[-1]
    made.offer(save(tmp_path / "run", 2))
    made.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(2)


STORES = ["file", pytest.param("s3", marks=[pytest.mark.full, needs_server])]


@pytest.mark.timeout(900)  # a server that shares the cores with other tests is slow
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
        remote, seconds, cut_off = RemoteRun(f"{base}/there"), copied(1, float("inf")), 0
        for step in range(2, 2 + KILLS):
            copied(step, chance.uniform(seconds / 2, seconds))
            cut_off += remote.candidates()[0] != store.checkpoint_name(step)
            assert verified(f"{base}/there", tmp_path / "fetched") in (1, 2)
        copied(99, float("inf"))
        assert remote.candidates()[0] == store.checkpoint_name(99)
        assert len(remote._steps()) <= 2, "what was cut off is removed"
    assert cut_off and not failed


# -- fetching


Change = Callable[[Path], None]


def rewritten(checkpoint: Path, change: Callable[[dict[str, FileSums]], None], step: int | None = None) -> None:
    """Change what the manifest says, its own sum included."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    files = dict(manifest.files)
    change(files)
    content: dict[str, Any] = {"step": step or manifest.step, "block_bytes": manifest.block_bytes, "files": files}
    content["crc32"] = f"{zlib.crc32(msgspec.json.encode(tuple(content.values()))):08x}"
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(content))


def out_of_the_folder(name: str) -> Change:
    def change(files: dict[str, FileSums]) -> None:
        files[name] = files[WEIGHTS]

    return lambda checkpoint: rewritten(checkpoint, change)


def too_long(checkpoint: Path) -> None:
    with (checkpoint / WEIGHTS).open("ab") as file:
        file.write(bytes(1 << 20))


DAMAGE: dict[str, Change] = {
    "a changed byte": lambda checkpoint: (checkpoint / WEIGHTS).write_bytes(bytes(256 * 5)) and None,
    "a longer file": too_long,
    "a missing file": lambda checkpoint: (checkpoint / WEIGHTS).unlink(),
    "half a manifest": lambda checkpoint: (checkpoint / MANIFEST).write_text('{"step": 5') and None,
    "another step": lambda checkpoint: rewritten(checkpoint, lambda files: None, step=4),
    "a name above": out_of_the_folder("../../escaped"),
    "the name above": out_of_the_folder(".."),
    "an absolute name": out_of_the_folder("/tmp/escaped-from-a-mirror"),
    "a name with a zero": out_of_the_folder("a\0b"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_what_is_there_the_newest_sound_one_is_taken(damage: str, tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for step in (4, 5):
        save(source, step)
    DAMAGE[damage](source / store.CHECKPOINTS / store.checkpoint_name(5))
    fetch_newer(f"file://{source}", run)
    assert there(run) == step_names(4)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith((".step", "escaped"))) == []
    assert store.latest_checkpoint(run) == run / store.CHECKPOINTS / store.checkpoint_name(4)
    shutil.rmtree(source / store.CHECKPOINTS / store.checkpoint_name(4))
    shutil.rmtree(run)
    with pytest.raises(CorruptError, match=f"file://{source}/{store.CHECKPOINTS}/{store.checkpoint_name(5)}"):
        fetch_newer(f"file://{source}", run)


def test_no_more_is_fetched_of_a_file_than_one_byte_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, sizes = save(tmp_path / "source", 5), list[int]()
    too_long(checkpoint)
    monkeypatch.setattr(remote, "check_files", lambda folder, _: sizes.append((folder / WEIGHTS).stat().st_size))
    RemoteRun(f"file://{tmp_path}/source").fetch(checkpoint.name, tmp_path / "run")
    assert sizes == [256 * 5 + 1]


def test_nothing_is_fetched_that_is_not_newer(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    save(source, 5)
    save(run, 5, b"its own")
    fetch_newer(f"file://{source}", run)
    assert (run / store.CHECKPOINTS / store.checkpoint_name(5) / WEIGHTS).read_bytes() == b"its own"


def test_a_latest_that_was_set_back_there_is_followed(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for step in (4, 5):
        save(source, step)
    (source / store.CHECKPOINTS / store.LATEST).write_text(store.checkpoint_name(4))
    fetch_newer(f"file://{source}", run)
    assert there(run) == step_names(4)


def test_a_store_that_does_not_answer_ends_only_what_would_start_anew(
    failing: str, tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    FailingFiles.target, FailingFiles.kind = -1, "refused"
    with pytest.raises(FanformerError, match="cannot be reached") as error:
        fetch_newer(failing, tmp_path / "run")
    assert error.value.exit_code == 1 and "secret" not in str(error.value)
    assert len(pauses) == 3
    save(tmp_path / "run", 1)
    fetch_newer(failing, tmp_path / "run")
    assert "going on with what is in" in caplog.messages[-1]


def test_one_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"disk/run cannot be used \(FileNotFoundError"):
        fetch_newer(f"file://{tmp_path}/disk/run", tmp_path / "run")


def test_a_url_names_a_run_or_one_of_its_checkpoints_and_is_fetched_once(tmp_path: Path) -> None:
    source, told = tmp_path / "source", list[str]()
    for step in (4, 5):
        save(source, step)
    url = f"file://{source}"
    cache = tmp_path / "cache"
    newest = fetched(f"{url}/", cache, told.append)
    assert newest.name == store.checkpoint_name(5)
    assert fetched(f"{url}/{store.CHECKPOINTS}/{newest.name}", cache, told.append) == newest
    assert len(told) == 1
    save(source, 5, b"another one")
    assert (fetched(url, cache, told.append) / WEIGHTS).read_bytes() == b"another one"
    assert fetched(f"{url}/{store.CHECKPOINTS}/{store.checkpoint_name(4)}", cache, told.append).name.endswith("4")
    for missing in (f"file://{tmp_path}/none", f"{url}/{store.CHECKPOINTS}/{store.checkpoint_name(6)}"):
        with pytest.raises(InputError):
            fetched(missing, cache, told.append)


# -- names


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("runs/mirror", "must be a folder's URL"),
        ("memory://mirror", "must be a folder's URL"),
        ("simplecache::s3://bucket/run", "must be a folder's URL"),
        ("sftp://user:secret@host/run", "holds a password"),
        ("s3://key:sec/ret@bucket/run", "holds a password"),
    ],
)
def test_a_wrong_url_is_told_without_its_password(url: str, reason: str) -> None:
    (problem,) = CheckpointConfig(mirror=url).problems()
    assert reason in problem and "ret" not in problem.partition(";")[0]


def test_a_driver_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a driver that is not installed"):
        fetched("nosuchstore://user:secret@host/run", tmp_path, print)
    assert redacted("open sftp://user:secret@host/run failed") == "open sftp://…@host/run failed"
    assert redacted("sftp://user@host, s3://bucket/a@b") == "sftp://…@host, s3://bucket/a@b"


def test_a_copy_never_outlives_its_run_s_patience(mirrored: tuple[Mirror, list[str]], tmp_path: Path) -> None:
    made, _ = mirrored
    made.offer(save(tmp_path / "run", 1))
    started = time.monotonic()
    made.finish(lambda: True)
    assert time.monotonic() - started < 1
