import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyarrow import parquet

from megatron_fanformer.cli import main
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare import prepare as hold_out
from megatron_fanformer.prepare.documents import BLOCK_BYTES
from megatron_fanformer.prepare.prepare import PrepareConfig, _settings
from tests.prepare.making import Prepare, WriteLines, as_line, hashes


@pytest.fixture
def damaged(write_lines: WriteLines) -> Path:
    """A hundred documents, the last of them cut off."""
    return cut_off(write_lines("damaged.jsonl.gz", [as_line("text " * 100)] * 100))


def cut_off(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-9])
    return file


def test_megatrons_reader_gives_every_document_and_its_end(
    token_prefix: str, sample_texts: list[str], small_tokenizer_file: Path
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = load_tokenizer(small_tokenizer_file)
    expected = [[*tokenizer.encode(text), tokenizer.eod_id] for text in sample_texts]
    assert [document.tolist() for document in IndexedDataset(token_prefix)] == expected


def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare
) -> None:
    long = write_lines("a.jsonl.gz", (as_line(f"{n} line\n" * 3000) for n in range(BLOCK_BYTES * 3 // 25_000)))
    mixed = write_lines("b.jsonl", [b"{" if n % 5 == 0 else as_line(f"document {n}") for n in range(2000)])
    for count in (1, 2, 3):
        prefix = str(tmp_path / str(count) / "tokens")
        prepare(prefix, long, mixed, workers=count)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2") == hashes(tmp_path / "3")


def test_a_refused_lines_number_counts_from_its_own_file_over_blocks(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare
) -> None:
    first = write_lines("a.jsonl", [as_line("a")] * 3)
    second = write_lines("b.jsonl", [*[as_line("x" * 100_000)] * 11, b"{"])
    seen: list[tuple[int, float]] = []
    manifest = prepare(tmp_path / "out", first, second, progress=lambda *so_far: seen.append(so_far)).manifest
    assert str(manifest.refused_examples[0]) == f"{second}:12: not JSON"
    assert seen[-1] == (14, 1.0)


def test_the_same_preparation_again_does_nothing(tmp_path: Path, mixed: Path, prepare: Prepare) -> None:
    prefix = tmp_path / "new" / "out"
    first = prepare(prefix, mixed)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()}
    os.utime(mixed, (1, 1))  # its content is the same
    (tmp_path / "new" / "out.parts").mkdir()  # as a run leaves it that is killed after its last step
    again = prepare(prefix, mixed, workers=2)
    assert (again.already_there, again.manifest) == (True, first.manifest)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()}


def test_an_output_that_names_a_folder_is_refused_before_anything(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of web/ would be web.bin and its like, beside that folder, and another preparation's."""
    monkeypatch.chdir(tmp_path)
    for output, remedy in {"web/": "web/web", "..": "../web", "a/.": "a/./web"}.items():
        with pytest.raises(
            InputError, match=f"^output {output} names a folder; name a prefix in it, such as {remedy}$"
        ):
            prepare(output, mixed)
    for output, refusal in ((mixed / "out", "cannot be written"), ("s3://bucket/web", "is on another store")):
        with pytest.raises(InputError, match=refusal):
            prepare(output, mixed)
    assert list(tmp_path.iterdir()) == [mixed]


@pytest.mark.parametrize(
    "change", ["inputs", "content", {"text_field": "content"}, {"eod_id": 5}, {"strict": True}], ids=str
)
def test_an_output_made_otherwise_is_refused_and_left_alone(
    tmp_path: Path, mixed: Path, write_lines: WriteLines, prepare: Prepare, change: Any
) -> None:
    prefix = tmp_path / "new" / "out"
    prepare(prefix, mixed)
    before = hashes(tmp_path / "new")
    if change == "content":
        mixed.write_bytes(mixed.read_bytes().replace(b"one", b"1ne"))
    file = write_lines("other.jsonl", [as_line("other")]) if change == "inputs" else mixed
    with pytest.raises(InputError, match="exists"):
        prepare(prefix, file, **(change if isinstance(change, dict) else {}))
    assert hashes(tmp_path / "new") == before


@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.manifest.json"])
def test_token_files_without_a_manifest_are_never_overwritten(
    tmp_path: Path, mixed: Path, prepare: Prepare, name: str
) -> None:
    (tmp_path / name).write_bytes(b"somebody's")
    before = hashes(tmp_path)
    with pytest.raises(FanformerError, match=name):
        prepare(tmp_path / "out", mixed)
    assert hashes(tmp_path) == before


def test_damaged_inputs_are_all_named_and_nothing_is_published(
    tmp_path: Path, mixed: Path, damaged: Path, prepare: Prepare
) -> None:
    other = damaged.rename(tmp_path / "a.jsonl.gz")
    damaged.write_bytes(other.read_bytes())
    with pytest.raises(CorruptError, match=r"a\.jsonl.*truncated.*damaged.*truncated.*same command continues"):
        prepare(tmp_path / "new" / "out", mixed, other, damaged)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.parts"]


@pytest.mark.parametrize(("name", "settings"), [("a.jsonl", {}), ("a.npy", {"from_npy": True})])
def test_an_input_that_the_system_fails_to_read_is_named(
    tmp_path: Path, prepare: Prepare, name: str, settings: dict[str, Any]
) -> None:
    """As the beginning of a worker's memory is."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(FanformerError) as error:
        prepare(tmp_path / "out", tmp_path / name, **settings)
    line = f"{tmp_path / name} cannot be read (Input/output error); check its disk, and run the same command to"
    assert str(error.value).startswith(line) and error.value.exit_code == 1


@pytest.mark.parametrize("is_shard_damaged", [False, True])
def test_once_the_damaged_input_is_mended_the_rest_is_not_done_again(
    tmp_path: Path, mixed: Path, write_lines: WriteLines, prepare: Prepare, is_shard_damaged: bool
) -> None:
    """Unless its shard was damaged, too."""
    other = write_lines("other.jsonl.gz", [as_line("text " * 100)] * 100)
    whole, times = other.read_bytes(), (1, 1)
    os.utime(other, times)
    prepare(tmp_path / "expected" / "out", mixed, other)
    cut_off(other)
    with pytest.raises(CorruptError, match="truncated"):
        prepare(tmp_path / "new" / "out", mixed, other)
    other.write_bytes(whole)
    os.utime(other, times)
    if is_shard_damaged:
        os.truncate(tmp_path / "new" / "out.parts" / "000000.tokens", 2)
    prepare(tmp_path / "new" / "out", mixed, other)
    assert hashes(tmp_path / "new") == hashes(tmp_path / "expected")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_npy_ids_have_room_for_the_whole_vocabulary(vocab_size: int, dtype: str) -> None:
    config = PrepareConfig(inputs=(), output="", tokenizer="", format="npy")
    assert _settings(config, mock.Mock(vocab_size=vocab_size)).dtype == dtype


@pytest.mark.parametrize("settings", [{"text_field": "content"}, {"eod_id": 5}, {"format": "npy"}, {}], ids=str)
def test_an_unfinished_preparation_of_another_kind_is_refused(
    tmp_path: Path, mixed: Path, damaged: Path, prepare: Prepare, settings: dict[str, Any]
) -> None:
    prefix = tmp_path / "out"
    with pytest.raises(CorruptError):
        prepare(prefix, mixed, damaged)
    inputs = [mixed, damaged] if settings else [mixed]
    with pytest.raises(InputError, match=rf"unfinished preparation.*{next(iter(settings), 'inputs')}"):
        prepare(prefix, *inputs, **settings)


def test_text_files_are_documents_named_by_their_paths_beside_lines(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare
) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for name, data in (("a.md", b"one\ntwo"), ("b/c.txt", b"three"), ("b/empty.txt", b""), ("latin.txt", b"caf\xe9")):
        (folder / name).write_bytes(data)
    write_lines("texts/z.jsonl", [as_line("four")])
    manifest = prepare(tmp_path / "out", folder).manifest
    rows = parquet.read_table(str(tmp_path / "out.ledger.parquet")).to_pylist()
    assert [(row["id"], row["line"]) for row in rows] == [(f"{folder}/a.md", 1), (f"{folder}/b/c.txt", 1), ("1", 1)]
    assert (manifest.lines_read, manifest.refused) == (5, {"empty text": 1, "invalid UTF-8": 1})
    with pytest.raises(InputError, match=r"a\.md is plain text, which holds no conversation"):
        prepare(tmp_path / "chat", folder / "a.md", chat=True)


def test_inputs_may_be_named_otherwise_by_a_run_that_goes_on(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.md").write_text("a text")
    (folder / "b.txt").write_text("")
    whole = gzip.compress(as_line("a line"))
    (folder / "c.jsonl.gz").write_bytes(whole[:-4])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptError, match="is truncated"):
        prepare(tmp_path / "out", "texts")
    (folder / "c.jsonl.gz").write_bytes(whole)
    with pytest.raises(InputError, match=r"an unfinished preparation of .*out with other inputs"):
        prepare(tmp_path / "out", "elsewhere/link")  # which may lead elsewhere on another machine
    monkeypatch.chdir(folder)
    prepare(tmp_path / "out", folder / "c.jsonl.gz", "../elsewhere/link/../texts/b.txt", "./a.md")
    prepare(tmp_path / "once", folder)
    assert parquet.read_table(str(tmp_path / "out.ledger.parquet"))["id"].to_pylist() == [f"{folder}/a.md", "1"]
    for suffix in (".bin", ".idx", ".ledger.parquet"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"once{suffix}").read_bytes()


def test_npy_output_is_the_tokens_alone_and_documents_again(
    tmp_path: Path, sample_files: list[Path], prepare: Prepare, token_prefix: str
) -> None:
    npy, back = tmp_path / "npy" / "out", tmp_path / "back" / "out"
    prepare(npy, *sample_files, format="npy")
    assert set(hashes(npy.parent)) == {"out.npy", "out.ledger.parquet", "out.manifest.json"}
    prepare(back, Path(f"{npy}.npy"), from_npy=True)
    for found, suffix in ((f"{npy}.npy", ".bin"), (f"{back}.bin", ".bin"), (f"{back}.idx", ".idx")):
        assert Path(found).read_bytes() == Path(token_prefix + suffix).read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers"),
        ({"backend": "tokenizers"}, "backend"),
        ({"strict": True}, r"mixed\.jsonl:2: not JSON"),
        ({"text_field": "content"}, "5 no text field"),
    ],
)
def test_an_input_error_leaves_nothing(
    tmp_path: Path, mixed: Path, prepare: Prepare, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "new" / "out", mixed, **settings)
    assert list((tmp_path / "new").glob("out.[!p]*")) == []  # but perhaps finished shards


# -- hold out


HoldOut = Callable[..., int]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Seven files, of which three shares are 0; 3 and 4; 1, 2, 5 and 6."""
    (folder := tmp_path / "documents").mkdir()
    for number, lines in enumerate((90, 30, 20, 40, 15, 5)):
        text = b"\n".join(as_line(f"file {number} document {n}") for n in range(lines))
        (folder / f"{number}.jsonl").write_bytes(text)
    (folder / "6.md").write_text("A page.")
    return folder


@pytest.fixture
def run(tmp_path: Path, documents: Path, small_tokenizer_file: Path) -> HoldOut:
    """The command, to x of a folder, with further words."""

    def run(folder: str, *words: str, parts: int = 3) -> int:
        output, tokenizer = str(tmp_path / folder / "x"), str(small_tokenizer_file)
        common = ["--output", output, "--tokenizer", tokenizer, "--workers", "1"]
        return main(["prepare", str(documents), "--hold-out", str(parts), *common, *words])

    return run


def test_both_are_the_files_of_two_preparations(
    tmp_path: Path, documents: Path, prepare: Prepare, run: HoldOut, capsys: pytest.CaptureFixture[str]
) -> None:
    apart, files = tmp_path / "apart", sorted(documents.iterdir())
    held = hold_out.last_share(files, 3)
    prepare(apart / "x-validation", *held)
    prepare(apart / "x", *(file for file in files if file not in held))
    assert run("together") == 0
    whole = hashes(tmp_path / "together")
    assert whole == hashes(apart) and len(whole) > 5
    capsys.readouterr()
    assert run("together") == 0
    assert hashes(tmp_path / "together") == whole
    assert capsys.readouterr().out.count("already exists") == 2


def test_what_is_of_other_inputs_is_refused_before_anything_is_written(
    tmp_path: Path, documents: Path, prepare: Prepare, run: HoldOut, capsys: pytest.CaptureFixture[str]
) -> None:
    """A PREFIX of all files beside a validation of some would be trained on what it is measured by."""
    prepare(tmp_path / "all" / "x", documents)
    before = hashes(tmp_path / "all")
    assert run("all") == 2
    assert "already exists with other inputs (7 files" in capsys.readouterr().err
    assert hashes(tmp_path / "all") == before

    assert run("shared") == 0
    before = hashes(tmp_path / "shared")
    for file in (tmp_path / "shared").glob("x.*"):
        file.unlink()
    assert run("shared", parts=2) == 2  # whose training would have files of the validation that stands
    assert "x-validation already exists with other inputs" in capsys.readouterr().err
    assert run("shared") == 0
    assert hashes(tmp_path / "shared") == before


def test_the_shares_are_about_equal_by_bytes_of_text(documents: Path) -> None:
    assert [path.name[0] for path in hold_out.last_share(sorted(documents.iterdir()), 3)] == ["1", "2", "5", "6"]


def test_too_few_files_are_one_line_that_says_what_to_do(run: HoldOut, capsys: pytest.CaptureFixture[str]) -> None:
    for parts, line in ((8, "more than the files given (7), which are not cut; give more files"), (1, "at least 2")):
        assert run("x", parts=parts) == 2
        errors = capsys.readouterr().err
        assert line in errors and errors.count("\n") == 1
