import multiprocessing
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.data.documents import BLOCK_BYTES
from megatron_fanformer.data.pipeline import PrepareProgress
from megatron_fanformer.data.prepare import PrepareConfig, prepare
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from tests.data.making import as_line, prepare_files

WriteLines = Callable[[str, Iterable[bytes]], Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def mixed(write_lines: WriteLines) -> Path:
    """Seven lines: three documents and four refused lines."""
    lines = [as_line("one"), b"{", as_line(""), as_line("two\ttwo"), b'{"id": 1}', b"{", as_line("three")]
    return write_lines("mixed.jsonl", lines)


def test_megatrons_reader_gives_every_document_and_its_end(
    token_prefix: str, sample_texts: list[str], small_tokenizer_file: Path
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = load_tokenizer(small_tokenizer_file)
    expected = [[*tokenizer.encode(text), tokenizer.eod_id] for text in sample_texts]
    assert [document.tolist() for document in IndexedDataset(token_prefix)] == expected


def test_every_sample_document_ends_with_50279_under_the_papers_tokenizer(
    tmp_path: Path, sample_files: list[Path], olmo_tokenizer_file: Path
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = str(tmp_path / "olmo")
    prepare_files(prefix, sample_files, olmo_tokenizer_file)
    ends = [(int(document[-1]), int((document == 50279).sum())) for document in IndexedDataset(prefix)]
    assert ends == [(50279, 1)] * 30


def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    long = write_lines("a.jsonl.gz", (as_line(f"{n} line\n" * 3000) for n in range(BLOCK_BYTES * 3 // 25_000)))
    mixed = write_lines("b.jsonl", [b"{" if n % 5 == 0 else as_line(f"document {n}") for n in range(2000)])
    for workers in (1, 2, 3):
        prefix = str(tmp_path / str(workers) / "tokens")
        prepare_files(prefix, [long, mixed], small_tokenizer_file, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_lines_are_documents_or_counted_by_reason(tmp_path: Path, mixed: Path, small_tokenizer_file: Path) -> None:
    manifest = prepare_files(str(tmp_path / "out"), [mixed], small_tokenizer_file).manifest
    assert (manifest.lines_read, manifest.documents, manifest.refused) == (
        7,
        3,
        {"empty text": 1, "no text field": 1, "not JSON": 2},
    )


def test_refused_lines_are_named(tmp_path: Path, mixed: Path, small_tokenizer_file: Path) -> None:
    manifest = prepare_files(str(tmp_path / "out"), [mixed], small_tokenizer_file).manifest
    assert [example.line for example in manifest.refused_examples] == [2, 3, 5, 6]


def test_a_refused_lines_number_counts_from_its_own_file_over_blocks(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    first = write_lines("a.jsonl", [as_line("a")] * 3)
    second = write_lines("b.jsonl", [*[as_line("x" * 100_000)] * 11, b"{"])
    manifest = prepare_files(str(tmp_path / "out"), [first, second], small_tokenizer_file).manifest
    assert str(manifest.refused_examples[0]) == f"{second}:12: not JSON"


def test_strict_stops_at_the_first_refused_line_and_leaves_nothing(
    tmp_path: Path, mixed: Path, small_tokenizer_file: Path
) -> None:
    with pytest.raises(InputError, match=r"mixed\.jsonl:2: not JSON"):
        prepare_files(str(tmp_path / "new" / "out"), [mixed], small_tokenizer_file, strict=True)
    assert not (tmp_path / "new").exists()


def test_the_manifest_tells_what_the_files_hold(token_prefix: str, sample_files: list[Path]) -> None:
    from megatron_fanformer.data.manifest import read_manifest, sha256_of

    manifest = read_manifest(token_prefix)
    assert manifest is not None
    tokens = np.fromfile(token_prefix + ".bin", np.uint16)
    assert (manifest.tokens, manifest.max_token_id) == (len(tokens), tokens.max())
    assert [record.sha256 for record in manifest.inputs] == [sha256_of(file) for file in sample_files]
    for suffix, record in (("bin", manifest.outputs.bin), ("idx", manifest.outputs.idx)):
        assert record.sha256 == sha256_of(Path(f"{token_prefix}.{suffix}"))


def test_the_same_preparation_again_does_nothing(tmp_path: Path, mixed: Path, small_tokenizer_file: Path) -> None:
    prefix = str(tmp_path / "new" / "out")
    first = prepare_files(prefix, [mixed], small_tokenizer_file)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()}
    again = prepare_files(prefix, [mixed], small_tokenizer_file, workers=2)
    assert (again.already_there, again.manifest) == (True, first.manifest)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()}


def test_an_input_touched_but_unchanged_is_the_same(tmp_path: Path, mixed: Path, small_tokenizer_file: Path) -> None:
    prefix = str(tmp_path / "out")
    prepare_files(prefix, [mixed], small_tokenizer_file)
    os.utime(mixed, (1, 1))
    assert prepare_files(prefix, [mixed], small_tokenizer_file).already_there


@pytest.mark.parametrize("change", ["text_field", "eod_id", "inputs", "content", "strict"])
def test_an_output_made_otherwise_is_refused_and_left_alone(
    tmp_path: Path, mixed: Path, small_tokenizer_file: Path, change: str
) -> None:
    prefix = str(tmp_path / "new" / "out")
    prepare_files(prefix, [mixed], small_tokenizer_file)
    before = contents(tmp_path / "new")
    inputs = [mixed]
    settings: dict[str, object] = {}
    if change == "inputs":
        inputs = [tmp_path / "other.jsonl"]
        inputs[0].write_bytes(as_line("other") + b"\n")
    elif change == "content":
        mixed.write_bytes(mixed.read_bytes().replace(b"one", b"1ne"))
    else:
        settings = {change: {"text_field": "content", "eod_id": 5, "strict": True}[change]}
    with pytest.raises(InputError, match="exists"):
        prepare_files(prefix, inputs, small_tokenizer_file, **settings)
    assert contents(tmp_path / "new") == before


def test_token_files_without_a_manifest_are_never_overwritten(
    tmp_path: Path, mixed: Path, small_tokenizer_file: Path
) -> None:
    (tmp_path / "out.bin").write_bytes(b"somebody's")
    with pytest.raises(InputError, match="no complete preparation"):
        prepare_files(str(tmp_path / "out"), [mixed], small_tokenizer_file)
    assert (tmp_path / "out.bin").read_bytes() == b"somebody's"


def test_a_damaged_input_leaves_nothing(
    tmp_path: Path, mixed: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    damaged = write_lines("damaged.jsonl.gz", [as_line("text " * 100)] * 100)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(CorruptError, match="truncated"):
        prepare_files(str(tmp_path / "new" / "out"), [mixed, damaged], small_tokenizer_file)
    assert not (tmp_path / "new").exists()


def test_inputs_without_a_document_are_an_input_error(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    empty = write_lines("empty.jsonl", [b"{", b""])
    with pytest.raises(InputError, match="1 empty line, 1 not JSON"):
        prepare_files(str(tmp_path / "new" / "out"), [empty], small_tokenizer_file)
    assert not (tmp_path / "new").exists()


def test_a_worker_that_is_killed_is_noticed_and_nothing_is_left(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    long = write_lines("long.jsonl", [as_line("word " * 50_000)] * 40)

    others = set(multiprocessing.active_children())

    def kill_workers(progress: PrepareProgress) -> None:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()

    config = PrepareConfig(
        inputs=(str(long),),
        output=str(tmp_path / "new" / "out"),
        tokenizer=str(small_tokenizer_file),
        workers=2,
    )
    with pytest.raises(FanformerError, match="worker process died"):
        prepare(config, kill_workers)
    assert not (tmp_path / "new").exists()


def test_an_output_that_cannot_be_written_is_an_input_error(
    tmp_path: Path, mixed: Path, small_tokenizer_file: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        prepare_files(str(tmp_path / "file" / "out"), [mixed], small_tokenizer_file)


def test_two_preparations_of_one_prefix_do_not_mix(tmp_path: Path) -> None:
    from megatron_fanformer.data.token_files import TokenWriter

    first = TokenWriter(str(tmp_path / "out"), "uint16")
    with pytest.raises(InputError, match="another process"):
        TokenWriter(str(tmp_path / "out"), "uint16")
    first.close()


def test_leftovers_of_a_killed_preparation_are_overwritten(
    tmp_path: Path, mixed: Path, small_tokenizer_file: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "out.bin.partial").write_bytes(b"left over" * 1000)
    prepare_files(str(tmp_path / "new" / "out"), [mixed], small_tokenizer_file)
    assert sorted(contents(tmp_path / "new")) == ["out.bin", "out.idx", "out.manifest.json"]


def test_progress_ends_with_all_input_bytes(tmp_path: Path, mixed: Path, small_tokenizer_file: Path) -> None:
    seen: list[PrepareProgress] = []
    config = PrepareConfig(
        inputs=(str(mixed),), output=str(tmp_path / "out"), tokenizer=str(small_tokenizer_file), workers=1
    )
    prepare(config, seen.append)
    assert (seen[-1].documents, seen[-1].input_bytes) == (3, mixed.stat().st_size)


def test_workers_import_neither_torch_nor_megatron() -> None:
    import subprocess
    import sys

    code = (
        "import sys, megatron_fanformer.data.encoding, megatron_fanformer.data.prepare;"
        "print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
