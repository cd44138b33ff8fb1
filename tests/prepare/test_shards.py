"""`prepare --shard I/N` and `--merge N`: the very bytes of one machine's run, and no merge of what is not whole."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.errors import CorruptError, InputError, InUseError
from megatron_fanformer.prepare import id_encoders
from megatron_fanformer.prepare.prepare import prepare, prepare_shard
from megatron_fanformer.prepare.shards import work_folder
from megatron_fanformer.prepare.verb import PrepareConfig, Shard
from tests.data.chat_making import made_up_chats
from tests.prepare.making import as_line
from tests.prepare.test_interrupted import hashes

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


@pytest.mark.parametrize("settings", [{}, {"part_bytes": 3000}, CHAT], ids=["one", "parts", "chats"])
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
    assert not out.exists()
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
    with pytest.raises(InputError, match=r"shard-0-of-3.parts was prepared with text_field 'text' and not 'content'"):
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


def test_shards_of_which_one_distrusts_gigatoken_are_refused(
    config: Callable[..., PrepareConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine would have encoded all by the exact library."""
    monkeypatch.setattr(id_encoders, "SMALL_INPUT_BYTES", 0)
    prepare_shard(config(), Shard(0, 2))
    prepare_shard(config(backend="sentencepiece"), Shard(1, 2))
    with pytest.raises(InputError, match=r"several libraries: 0/2 by gigatoken.*, 1/2 by sentencepiece"):
        prepare(config(merge=2))


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "--shard 2/2": "'2/2' is not I/N, with I from 0 to N - 1",
        "--shard 1/2 --merge 2": "shard and merge are set, which do not go together",
        "--hold-out 2 --merge 2": "hold_out and merge are set, which do not go together",
        "--shard 0/2 --output s3://bucket/x": "is on another store, and shards are files of a disk",
        "--lists 3": "prepare --shard I/N, once for each I from 0 to N - 1, shares the files; --merge N joins",
        "--from-lists l --task 1": "prepare --shard I/N",
        "--status l": "prepare --merge N names the shards that are not done",
    }.items(),
)
def test_wrong_options_are_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "a.jsonl", "--tokenizer", "t", "--output", "x", *words.split()]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
