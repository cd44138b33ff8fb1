"""However often a preparation is cut short, the same command again ends with the very bytes of an undisturbed one."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.chat_making import made_up_chats
from tests.disk_steps import small_files
from tests.patience import PATIENCE_SECONDS
from tests.prepare import commands, fuzzing
from tests.prepare.making import as_line
from tests.small_runs import ROOT, start_command

LINES = 400
# The size of parts is far below an input's, so that parts end within shards, and some shards give several.
VARIANTS: dict[str, list[str]] = {
    "one": [],
    "parts": ["--part-size", "40K"],
    "npy": ["--format", "npy", "--part-size", "50K"],
}
CHATS: dict[str, list[str]] = {
    "chats": ["--chat", "--chat-template", "olmo", "--max-tokens", "300"],
    "rows of chats": ["--chat", "--chat-template", "olmo", "--format", "npy"],
}


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def options(tmp_path: Path, small_tokenizer_file: Path) -> list[str]:
    """The command but for its output, of a fuzzed corpus: all its files, `.json` files too."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    fuzzing.write_fuzzed(folder, LINES, seed=5)
    return [*sorted(map(str, folder.iterdir())), "--tokenizer", str(small_tokenizer_file)]


def complete(options: list[str], folder: Path, workers: int = 1) -> dict[str, str]:
    """Run to the end; returns the hashes of the output."""
    ended = commands.run([*options, "--output", str(folder / "tokens"), "--workers", str(workers)])
    assert ended.code == 0, ended.errors
    return hashes(folder)


@pytest.fixture
def chat_options(tmp_path: Path, small_tokenizer_file: Path) -> list[str]:
    """The command but for its output, of conversations, with lines that are none."""
    folder = tmp_path / "chats"
    folder.mkdir()
    chats = made_up_chats(400)
    for number in range(4):
        lines = [*(json.dumps({"messages": messages}) for messages in chats[number::4]), "not a conversation"]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return [str(folder), "--tokenizer", str(small_tokenizer_file)]


def killed_after(command: list[str], seconds: float) -> bool:
    """Start, and kill the whole run after a time; False where it had ended by itself."""
    process = start_command("prepare", *command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        commands.kill_all(process)
        return True
    process.communicate()
    assert process.returncode == 0
    return False


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, options: list[str]) -> None:
    options += VARIANTS["parts"]
    began = time.monotonic()
    expected = complete(options, tmp_path / "whole", workers=2)
    whole_seconds = time.monotonic() - began
    command = [*options, "--output", str(tmp_path / "killed" / "tokens"), "--workers", "2"]
    for share in (0.6, 0.9):
        killed_after(command, share * whole_seconds)
    assert complete(options, tmp_path / "killed", workers=3) == expected


def assert_killed_at_steps(options: list[str], folder: Path, stride: int) -> int:
    """Kill runs before steps of their ending, go on with each, and compare; returns how many were killed."""
    expected = complete(options, folder / "whole")
    trials = folder / "trials"
    trials.mkdir()
    program = [sys.executable, "-m", "tests.prepare.step_killing", str(trials), str(stride)]
    ran = subprocess.run([*program, *options, "--workers", "2"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    killed = int(ran.stdout.split()[-1])
    results = [hashes(trial) for trial in trials.iterdir() if trial.name != "done"]
    assert len(results) == killed + 1
    assert all(result == expected for result in results)
    return killed


def test_a_run_killed_in_its_ending_ends_with_the_same_bytes(tmp_path: Path, options: list[str]) -> None:
    assert assert_killed_at_steps([*options, *VARIANTS["parts"]], tmp_path, stride=12) > 2


@pytest.mark.full
@pytest.mark.parametrize("variant", list(CHATS))
def test_a_run_over_chats_killed_at_any_time_ends_with_the_same_bytes(
    tmp_path: Path, chat_options: list[str], variant: str
) -> None:
    command = [*chat_options, *CHATS[variant]]
    began = time.monotonic()
    expected = complete(command, tmp_path / "undisturbed")
    seconds = time.monotonic() - began
    again = [*command, "--output", str(tmp_path / "killed" / "tokens"), "--workers", "2"]
    for share in (0.5, 0.7, 0.9):
        killed_after(again, share * seconds)
    assert complete(command, tmp_path / "killed", workers=3) == expected
    assert assert_killed_at_steps(command, tmp_path, stride=1) > 10


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
        from megatron_fanformer.data.manifest import Manifest, read_any_manifest

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


@pytest.mark.parametrize("larger_than", [pytest.param("a shard", marks=pytest.mark.full), "the output"])
def test_a_full_disk_is_one_line_and_a_later_run_goes_on(
    tmp_path: Path, small_tokenizer_file: Path, larger_than: str
) -> None:
    """The system refuses to write beyond a size, as it does on a full disk: in a worker, or in the parent."""
    texts = [" ".join(random.Random(n).choices(fuzzing.WORDS, k=4_000)) for n in range(4)]
    files = [tmp_path / f"{n}.jsonl" for n in range(4)]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(as_line(text))
    options = [*map(str, files), "--tokenizer", str(small_tokenizer_file)]
    expected = complete(options, tmp_path / "whole")
    whole = (tmp_path / "whole" / "tokens.bin").stat().st_size
    command = [*options, "--output", str(tmp_path / "out" / "tokens"), "--workers", "2"]
    with small_files(whole // 16 if larger_than == "a shard" else whole // 2):
        ended = commands.run(command)
    assert (ended.code, ended.errors.count("\n")) == (1, 1), ended.errors
    assert "File too large" in ended.errors
    assert not (tmp_path / "out" / "tokens.manifest.json").exists()
    assert complete(options, tmp_path / "out", workers=2) == expected
