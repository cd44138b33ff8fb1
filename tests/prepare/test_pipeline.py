"""However often a preparation is cut short, the same command again ends with the very bytes of an undisturbed one."""

import gzip
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.errors import CorruptError, InputError, InUseError
from megatron_fanformer.prepare.encoded_inputs import work_folder
from megatron_fanformer.prepare.prepare import prepare, prepare_shard
from megatron_fanformer.prepare.verb import PrepareConfig, Shard
from tests.data.chat_making import made_up_chats
from tests.disk_steps import small_files
from tests.prepare import fuzzing
from tests.prepare.making import as_line, hashes
from tests.small_runs import start_command

LINES = 400


@pytest.fixture
def options(tmp_path: Path, small_tokenizer_file: Path) -> list[str]:
    """The command but for its output, of a fuzzed corpus: all its files, `.json` files too."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    fuzzing.write_fuzzed(folder, LINES, seed=5)
    return [*sorted(map(str, folder.iterdir())), "--tokenizer", str(small_tokenizer_file)]


def complete(options: list[str], folder: Path, workers: int = 1) -> dict[str, str]:
    """Run to the end; returns the hashes of the output."""
    process = start_command("prepare", *options, "--output", str(folder / "tokens"), "--workers", str(workers))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return hashes(folder)


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, options: list[str]) -> None:
    began = time.monotonic()
    expected = complete(options, tmp_path / "whole", workers=2)
    whole_seconds = time.monotonic() - began
    command = [*options, "--output", str(tmp_path / "killed" / "tokens"), "--workers", "2"]
    for share in (0.6, 0.9):
        process = start_command("prepare", *command)
        with suppress(subprocess.TimeoutExpired):
            process.wait(share * whole_seconds)
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert complete(options, tmp_path / "killed", workers=3) == expected


def test_a_full_disk_is_one_line_and_a_later_run_goes_on(tmp_path: Path, small_tokenizer_file: Path) -> None:
    """The system refuses to write beyond a size, as it does on a full disk."""
    texts = [" ".join(random.Random(n).choices(fuzzing.WORDS, k=4_000)) for n in range(4)]
    files = [tmp_path / f"{n}.jsonl" for n in range(4)]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(as_line(text))
    options = [*map(str, files), "--tokenizer", str(small_tokenizer_file)]
    expected = complete(options, tmp_path / "whole")
    command = [*options, "--output", str(tmp_path / "out" / "tokens"), "--workers", "2"]
    with small_files((tmp_path / "whole" / "tokens.bin").stat().st_size // 2):
        process = start_command("prepare", *command)
        _, errors = process.communicate()
    assert (process.returncode, errors.count("\n")) == (1, 1) and "File too large" in errors, errors
    assert not (tmp_path / "out" / "tokens.manifest.json").exists()
    assert complete(options, tmp_path / "out", workers=2) == expected


CHAT: dict[str, Any] = {"chat": True, "chat_template": "olmo", "max_tokens": 60}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (folder := tmp_path / "documents").mkdir()
    for number in range(5):
        lines = [as_line(f"file {number} document {n} " * 9) for n in range(40)]
        (folder / f"{number}.jsonl").write_bytes(b"\n".join([*lines, b"no document"]))
    return folder


@pytest.fixture
def config(tmp_path: Path, documents: Path, small_tokenizer_file: Path) -> Callable[..., PrepareConfig]:
    def config(**settings: Any) -> PrepareConfig:
        options = {"inputs": (str(documents),), "output": str(tmp_path / "out" / "x"), "workers": 1, **settings}
        return PrepareConfig(tokenizer=str(small_tokenizer_file), **options)

    return config


@pytest.mark.parametrize("settings", [{}, CHAT], ids=["documents", "chats"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_merged_shards_are_one_machines_run(
    tmp_path: Path, documents: Path, config: Callable[..., PrepareConfig], settings: dict[str, Any], count: int
) -> None:
    """More shards than files, too."""
    if settings is CHAT:
        for number, file in enumerate(documents.iterdir()):
            file.write_text("\n".join(json.dumps({"messages": chat}) for chat in made_up_chats(9 + number)))
    prepare(config(**{**settings, "output": str(tmp_path / "one" / "x")}))
    for number in reversed(range(count)):
        (line,) = prepare_shard(config(**settings), Shard(number, count))
        assert f"shard {number}/{count}: {len(range(number, 5, count))} file" in line
    report = prepare(config(**settings, merge=count))
    assert not report.already_there and prepare(config(**settings, merge=count)).already_there
    assert hashes(tmp_path / "out") == hashes(tmp_path / "one")


def test_what_is_not_whole_is_named_and_not_merged(
    tmp_path: Path, documents: Path, config: Callable[..., PrepareConfig]
) -> None:
    out = tmp_path / "out"
    merge = config(merge=3)
    with pytest.raises(CorruptError, match=r"--shard 0/3 \(2 files\), 1/3 \(2 files\), 2/3 \(1 file\); prepare these"):
        prepare(merge)
    assert list(out.iterdir()) == []
    for number in range(3):
        prepare_shard(config(), Shard(number, 3))
    part = out / "x.shard-1-of-3.parts"
    (part / "000001.tokens").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"x cannot be merged, files are left of --shard 1/3 \(1 file\); prepare"):
        prepare(merge)
    prepare_shard(config(), Shard(1, 3))
    (documents / "2.jsonl").write_bytes(as_line("another text"))
    with pytest.raises(CorruptError, match=r"files are left of --shard 2/3 \(1 file\)"):
        prepare(merge)
    prepare_shard(config(), Shard(2, 3))
    with work_folder(f"{out}/x.shard-0-of-3"), pytest.raises(InUseError, match="shard-0-of-3 is being written"):
        prepare(merge)
    with pytest.raises(InputError, match=r"shard-0-of-3.parts was prepared with other settings \(text_field\)"):
        prepare(config(merge=3, text_field="content"))
    (documents / "9.jsonl").write_bytes(as_line("one more"))
    with pytest.raises(InputError, match=r"shard-0-of-3.parts was prepared with other inputs"):
        prepare(merge)
    (documents / "9.jsonl").unlink()
    with pytest.raises(InputError, match=r"0\.jsonl:41: not JSON; fix the line, or prepare without strict"):
        prepare(config(merge=3, strict=True))
    prepare(merge)
    prepare(config(output=str(tmp_path / "one" / "x")))
    assert hashes(out) == hashes(tmp_path / "one")


def test_a_shard_goes_on_where_it_was(tmp_path: Path, documents: Path, config: Callable[..., PrepareConfig]) -> None:
    (documents / "2.jsonl").rename(damaged := documents / "2.jsonl.gz")
    with pytest.raises(CorruptError, match=r"2\.jsonl\.gz is damaged.*same command continues from there"):
        prepare_shard(config(), Shard(0, 2))
    done = tmp_path / "out" / "x.shard-0-of-2.parts" / "000000.json"
    before = done.stat().st_mtime_ns
    damaged.write_bytes(gzip.compress(damaged.read_bytes()))
    prepare_shard(config(), Shard(0, 2))
    assert done.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "--shard 2/2": "'2/2' is not I/N, with I from 0 to N - 1",
        "--shard 1/2 --merge 2": "argument --merge: not allowed with argument --shard",
        "--hold-out 2 --merge 2": "argument --merge: not allowed with argument --hold-out",
        "--from-npy --chat": "argument --chat: not allowed with argument --from-npy",
        "--lists 3": "prepare --shard I/N, once for each I from 0 to N - 1, shares the files; --merge N joins",
    }.items(),
)
def test_wrong_options_are_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "a.jsonl", "--tokenizer", "t", "--output", "x", *words.split()]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
