"""Checkpoints on another store: copies there and back are whole or none, whatever fails, and are checked.

Stores are folders here, by file:// or behind a filesystem that fails, and moto's S3 server where that is installed.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_fanformer import stores
from megatron_fanformer.checkpoint import remote, run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST, read_manifest
from megatron_fanformer.checkpoint.remote import Mirror, RemoteRun, fetch_checkpoint, fetch_newer
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from tests.checkpoint.stores import WEIGHTS, FailingFiles, needs_server, s3_server, save, step_names, there, verified

STORES = ["file", pytest.param("s3", marks=[pytest.mark.full, needs_server])]


@pytest.mark.parametrize("kind", STORES)
def test_a_copy_is_the_run_s_folder_again_and_the_newest_are_kept(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / run_folder.RECOVERY).write_text("{}\n")
    with s3_server(tmp_path) if kind == "s3" else nullcontext(f"file://{tmp_path}") as base:
        store = RemoteRun(f"{base}/there")
        store.copy(save(run, 9), keep=2)  # the run goes back
        stores.make_folder(store._files, f"{store._checkpoints}/step-00000002")
        store._files.pipe_file(f"{store._checkpoints}/step-00000002/{WEIGHTS}", b"a copy that was cut off")
        for step in (3, 4, 5):
            store.copy(save(run, step), keep=2)
        assert store._step_names() == store.complete() == step_names(4, 5, 9)
        assert store.candidates() == step_names(5, 4)
        assert store.fetch_record(run_folder.RECOVERY) == b"{}\n"
        for name in step_names(4, 5):
            copy = store.fetch([name], tmp_path / "fetched", print)
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


# -- the thread that copies


@pytest.fixture
def mirror(failing: str) -> Mirror:
    return Mirror(failing, keep=None)


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


def test_one_is_copied_at_a_time_and_the_newest_is_next(mirror: Mirror, held: threading.Event, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        mirror.offer(save(tmp_path / "run", step))
    assert list(mirror.in_use) == step_names(1, 3)
    held.set()
    mirror.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(1, 3)
    assert not mirror.in_use


def test_a_failed_copy_is_tried_again_and_then_the_next_checkpoint_is(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses = [0.001 * number for number in range(6)]
    monkeypatch.setattr(remote, "PAUSES_SECONDS", pauses)
    FailingFiles.target, FailingFiles.kind = 2, "refused"
    mirror.offer(save(tmp_path / "run", 1))
    mirror.finish(lambda: False)
    assert there(tmp_path / "there") == step_names(1)
    FailingFiles.target = -1
    mirror.offer(save(tmp_path / "run", 2))
    mirror.finish(lambda: False)
    assert caplog.text.count("is not copied to") == 1 + 7 + 1
    assert "secret" not in caplog.text and "the store does not answer" in caplog.text
    assert not mirror.in_use


@pytest.mark.parametrize("ending", ["enough", "seconds"])
def test_the_end_of_a_run_does_not_wait_for_a_store_that_never_answers(
    ending: str, mirror: Mirror, held: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.offer(save(tmp_path / "run", 1))
    mirror.finish(lambda: ending == "enough", 0.2)
    assert list(mirror.in_use) == step_names(1)
    assert "step-00000001 is not copied" in caplog.messages[-1]


# -- checkpoints that are fetched


Change = Callable[[Path], None]


def named_also(name: str) -> Change:
    """The weights under another name, too, with a copy of them where the store resolves it."""

    def change(checkpoint: Path) -> None:
        full_name = name.replace("ABOVE", str(checkpoint.parents[2]))
        with suppress(OSError, ValueError):
            copy = Path(f"{checkpoint}/{full_name}").resolve()
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkpoint / WEIGHTS, copy)
        manifest = read_manifest(checkpoint)
        files = {**manifest.files, full_name: manifest.files[WEIGHTS]}
        (checkpoint / MANIFEST).write_bytes(msgspec.json.encode({"step": manifest.step, "files": files}))

    return change


def too_long(checkpoint: Path) -> None:
    with (checkpoint / WEIGHTS).open("ab") as file:
        file.write(bytes(1 << 20))


DAMAGE: dict[str, Change] = {
    "a changed byte": lambda checkpoint: (checkpoint / WEIGHTS).write_bytes(bytes(256 * 5)) and None,
    "a longer file": too_long,
    "a missing file": lambda checkpoint: (checkpoint / WEIGHTS).unlink(),
    "half a manifest": lambda checkpoint: (checkpoint / MANIFEST).write_text('{"step": 5') and None,
    "a name above": named_also("../../escaped"),
    "the name above": named_also(".."),
    "an absolute name": named_also("ABOVE/escaped"),
    "a name with a zero": named_also("a\0b"),
}
NAMES = ("a name above", "the name above", "an absolute name", "a name with a zero")


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_what_is_there_the_newest_sound_one_is_taken(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for step in (4, 5):
        save(source, step)
    DAMAGE[damage](source / run_folder.CHECKPOINTS / run_folder.checkpoint_name(5))
    fetch_newer(f"file://{source}", run)
    assert there(run) == step_names(4)
    assert ("which is not a file in its folder" in caplog.text) == (damage in NAMES)
    assert not (tmp_path / "escaped").exists() and not list(run.rglob("escaped")) and not list(run.rglob(".step*"))
    assert run_folder.latest_checkpoint(run) == run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(4)
    shutil.rmtree(source / run_folder.CHECKPOINTS / run_folder.checkpoint_name(4))
    shutil.rmtree(run)
    with pytest.raises(CorruptError, match=f"file://{source}/{run_folder.CHECKPOINTS}/{run_folder.checkpoint_name(5)}"):
        fetch_newer(f"file://{source}", run)


@pytest.mark.parametrize("kept", ["the small files", "the manifest"])
def test_a_damaged_one_here_does_not_hide_the_sound_one_there(kept: str, tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    sound = save(source, 5)
    save(run, 4)
    damaged = save(run, 5, b"its own")
    (damaged / (run_folder.CONFIG if kept == "the manifest" else MANIFEST)).write_text("{")
    fetch_newer(f"file://{source}", run, use_earlier=False)
    assert there(run) == step_names(4, 5)
    assert (damaged / WEIGHTS).read_bytes() == (sound / WEIGHTS).read_bytes()
    assert (damaged.parent / f"damaged-{damaged.name}" / WEIGHTS).read_bytes() == b"its own"


def test_an_earlier_one_is_fetched_only_where_it_may_be_used(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    save(source, 4)
    (save(run, 5) / run_folder.CONFIG).write_text("{")
    fetch_newer(f"file://{source}", run, use_earlier=False)
    assert [path.name for path in run_folder._step_folders(run / run_folder.CHECKPOINTS)] == step_names(5)
    fetch_newer(f"file://{source}", run)
    assert run_folder.latest_checkpoint(run) == run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(4)


def test_whatever_call_fails_the_run_s_records_come_with_its_checkpoint(
    failing: str, tmp_path: Path, pauses: list[float]
) -> None:
    """Every call of a fetch fails once, and none keeps it from succeeding in the end."""
    source = tmp_path / "there"
    save(source, 5)
    (source / run_folder.METRICS).write_text("{}\n")
    (source / run_folder.RECOVERY).write_text("[]\n")
    FailingFiles.kind = "refused"
    for target in range(1, 1000):
        run = tmp_path / f"run-{target}"
        FailingFiles.count, FailingFiles.target = 0, target
        fetch_newer(failing, run)
        assert there(run) == step_names(5)
        assert (run / run_folder.METRICS).read_text() == "{}\n" and (run / run_folder.RECOVERY).read_text() == "[]\n"
        if target > FailingFiles.count:
            break
    assert len(pauses) == target - 1 > 5


def test_records_here_that_go_on_further_stay(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    save(source, 5)
    run.mkdir()
    for name, there_, here in ((run_folder.METRICS, "1\n2\n", "1\n2\n3\n"), (run_folder.RECOVERY, "a\nb\n", "a\n")):
        (source / name).write_text(there_)
        (run / name).write_text(here)
    fetch_newer(f"file://{source}", run)
    assert (run / run_folder.METRICS).read_text() == "1\n2\n3\n"
    assert (run / run_folder.RECOVERY).read_text() == "a\nb\n"


def test_a_latest_that_was_set_back_there_is_followed(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for step in (4, 5):
        save(source, step)
    (source / run_folder.CHECKPOINTS / run_folder.LATEST).write_text(run_folder.checkpoint_name(4))
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
    source, message = tmp_path / "source", list[str]()
    for step in (4, 5):
        save(source, step)
    url = f"file://{source}"
    cache = tmp_path / "cache"
    newest = fetch_checkpoint(f"{url}/", cache, message.append)
    assert newest.name == run_folder.checkpoint_name(5)
    assert fetch_checkpoint(f"{url}/{run_folder.CHECKPOINTS}/{newest.name}", cache, message.append) == newest
    assert len(message) == 1
    save(source, 5, b"another one")
    assert (fetch_checkpoint(url, cache, message.append) / WEIGHTS).read_bytes() == b"another one"
    earlier, later = (f"{url}/{run_folder.CHECKPOINTS}/{run_folder.checkpoint_name(step)}" for step in (4, 6))
    assert fetch_checkpoint(earlier, cache, message.append).name.endswith("4")
    for missing in (f"file://{tmp_path}/none", later):
        with pytest.raises(InputError):
            fetch_checkpoint(missing, cache, message.append)
