"""Worker processes that die, and those that outlive nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.prepare import workers
from tests.patience import PATIENCE_SECONDS
from tests.prepare import commands
from tests.prepare.making import Prepare, WriteLines, as_line, hashes
from tests.prepare.mortal_workers import DEATHS, encode_or_die
from tests.small_runs import start_command


class LongInput:
    """A preparation of two inputs, the second of which takes a worker long enough to be stopped there."""

    DOCUMENTS = 321

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder / "out"
        self._second = folder / "b.jsonl"
        self._second.write_bytes((as_line("one two three " * 7_500) + b"\n") * (self.DOCUMENTS - 1))
        first = folder / "a.jsonl"
        first.write_bytes(as_line("one"))
        self.command = [str(first), str(self._second), "--output", str(self.folder / "tokens")]
        self.command += ["--tokenizer", str(tokenizer), "--workers", "1"]

    def stopped_worker(self, session: int, *dead: int) -> int:
        """The process of the worker that has the second input open, as none of the dead ones; it is stopped."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for worker in set(filter(_is_worker, commands.session_members(session))) - set(dead):
                if self._is_open_in(worker):
                    os.kill(worker, signal.SIGSTOP)
                    return worker
            time.sleep(0.005)
        raise AssertionError("no worker")

    def _is_open_in(self, process: int) -> bool:
        try:
            return any(file.readlink() == self._second for file in Path(f"/proc/{process}/fd").iterdir())
        except OSError:  # it has closed one, or ended
            return False

    def documents(self) -> int:

        manifest = read_any_manifest(str(self.folder / "tokens"))
        assert isinstance(manifest, Manifest)
        return manifest.documents


def _is_worker(process: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def long_input(tmp_path: Path, small_tokenizer_file: Path) -> LongInput:
    return LongInput(tmp_path, small_tokenizer_file)


def test_a_file_that_kills_its_workers_is_named_at_once(long_input: LongInput) -> None:
    process = start_command("prepare", *long_input.command)
    dead: list[int] = []
    for _ in range(2):
        dead.append(long_input.stopped_worker(process.pid, *dead))
        os.kill(dead[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors.count("\n")) == (1, 1)
    assert "two workers died" in errors and "b.jsonl" in errors


def test_workers_do_not_outlive_their_parent(long_input: LongInput) -> None:
    process = start_command("prepare", *long_input.command)
    long_input.stopped_worker(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(_is_worker, commands.session_members(process.pid))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.communicate()


def test_a_worker_that_dies_has_its_file_tried_once_more(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines("a.jsonl", [as_line("some words")])
    prepare(tmp_path / "expected" / "out", file)
    monkeypatch.setattr(workers, "encode_file", encode_or_die)
    file.with_name(DEATHS).write_text("1")
    prepare(tmp_path / "new" / "out", file)
    assert file.with_name(DEATHS).read_text() == "0"
    assert hashes(tmp_path / "new") == hashes(tmp_path / "expected")
    file.with_name(DEATHS).write_text("2")
    with pytest.raises(FanformerError, match=r"two workers died while preparing .*a\.jsonl"):
        prepare(tmp_path / "never" / "out", file)
    assert not (tmp_path / "never").exists()


def test_the_files_beside_one_that_kills_its_worker_are_done(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_lines(f"{number}.jsonl", [as_line("some words")]) for number in range(5)]
    monkeypatch.setattr(workers, "encode_file", encode_or_die)
    files[0].with_name(DEATHS).write_text("2")
    with pytest.raises(
        FanformerError, match=r"^two workers died while preparing \S*0\.jsonl .*short; what is done stays"
    ):
        prepare(tmp_path / "new" / "out", *files, workers=2)
    done = [path.stem for path in (tmp_path / "new" / "out.parts").glob("[0-9]*.json")]
    assert sorted(done) == ["000001", "000002", "000003", "000004"]


def test_workers_import_neither_torch_nor_megatron() -> None:

    code = (
        "import sys, megatron_fanformer.prepare.workers, megatron_fanformer.prepare.prepare;"
        "print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
