"""Worker processes that die, and those that outlive nobody."""

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.prepare import pipeline
from tests.patience import wait_until
from tests.prepare.making import Prepare, WriteLines, as_line, hashes
from tests.prepare.mortal_workers import DEATHS, encode_or_die
from tests.small_runs import start_command


def session_members(session: int) -> list[int]:
    """The processes of a session that live."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session, …
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(folder.name))
    return members


def _is_worker(process: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_worker_that_dies_has_its_file_tried_once_more(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines("a.jsonl", [as_line("some words")])
    prepare(tmp_path / "expected" / "out", file)
    monkeypatch.setattr(pipeline, "encode_file", encode_or_die)
    file.with_name(DEATHS).write_text("1")
    prepare(tmp_path / "new" / "out", file)
    assert file.with_name(DEATHS).read_text() == "0"
    assert hashes(tmp_path / "new") == hashes(tmp_path / "expected")


def test_the_files_beside_one_that_kills_its_worker_are_done(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_lines(f"{number}.jsonl", [as_line("some words")]) for number in range(5)]
    monkeypatch.setattr(pipeline, "encode_file", encode_or_die)
    files[0].with_name(DEATHS).write_text("2")
    with pytest.raises(
        FanformerError, match=r"^two workers died while preparing \S*0\.jsonl .*short; what is done stays"
    ):
        prepare(tmp_path / "new" / "out", *files, workers=2)
    done = [path.stem for path in (tmp_path / "new" / "out.parts").glob("[0-9]*.json")]
    assert sorted(done) == ["000001", "000002", "000003", "000004"]


def test_a_worker_that_dies_while_the_next_one_starts_is_no_failing_disk(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython's pool then closes a pipe in the midst of `submit`. But too many open files are the system's error."""
    files = [write_lines(f"{number}.jsonl", [as_line("some words")]) for number in range(3)]

    def second_without_pipe(pool: Any, *arguments: Any, submit: Any = ProcessPoolExecutor.submit) -> Any:
        if pool._processes:
            pool._call_queue._reader.close()
        return submit(pool, *arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", second_without_pipe)
    assert prepare(tmp_path / "out", *files, workers=2).manifest.documents == 3
    monkeypatch.setattr(ProcessPoolExecutor, "submit", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(FanformerError, match="Too many open files"):
        prepare(tmp_path / "new", *files, workers=2)


def test_workers_import_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_fanformer.prepare.prepare;print({'torch', 'megatron', 'transformers'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_workers_do_not_outlive_their_parent(tmp_path: Path, small_tokenizer_file: Path) -> None:
    """Nor one that is stopped amid a long file."""
    (long := tmp_path / "a.jsonl").write_bytes((as_line("one two three " * 7_500) + b"\n") * 320)
    command = [str(long), "--output", str(tmp_path / "out" / "tokens"), "--tokenizer", str(small_tokenizer_file)]
    process = start_command("prepare", *command, "--workers", "1")
    wait_until(lambda: any(has_open(member, long) for member in session_members(process.pid)))
    (worker,) = (member for member in session_members(process.pid) if has_open(member, long))
    os.kill(worker, signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(_is_worker, session_members(process.pid))))
    process.communicate()


def has_open(process: int, path: Path) -> bool:
    try:
        return any(file.readlink() == path for file in Path(f"/proc/{process}/fd").iterdir())
    except OSError:  # it has closed one, or ended
        return False
