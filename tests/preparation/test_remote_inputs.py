"""Documents on other stores: the token files are those of the same documents here, and what fails is made good."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from isal import igzip
from pyarrow import parquet

from megatron_fanformer.data import remote_files
from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.document_files import DocumentFile, parse_block
from megatron_fanformer.preparation.documents import DocumentParser
from megatron_fanformer.preparation.inputs import expand_inputs
from megatron_fanformer.preparation.prepare import PrepareConfig, prepare
from megatron_fanformer.preparation.remote_inputs import RemoteInput
from tests.data.failing_stores import Plan, planned
from tests.preparation.making import as_line


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of each kind of file, one of them in a folder below."""
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 40)
    lines = b"".join(as_line(f"document {number} " * 40) + b"\n" for number in range(3000))
    (folder := tmp_path / "documents" / "below").mkdir(parents=True)
    (folder / "c.jsonl").write_bytes(lines)
    (folder.parent / "a.jsonl.gz").write_bytes(igzip.compress(lines))
    table = pyarrow.table({"text": [f"row {number}" for number in range(5000)]})
    parquet.write_table(table, folder.parent / "b.parquet", row_group_size=500)
    (folder.parent / "own.manifest.json").write_text("{}")
    remote_files.forget()
    yield folder.parent
    remote_files.forget()


def test_token_files_are_those_of_documents_here(
    documents: Path, tmp_path: Path, small_tokenizer_file: Path, forked_workers: None
) -> None:
    def prepared(place: str, output: str) -> Manifest:
        options = {"output": str(tmp_path / output), "tokenizer": str(small_tokenizer_file), "workers": 2}
        report = prepare(PrepareConfig(inputs=(place,), **options))
        assert report.already_there is (output in done)
        done.add(output)
        return report.manifest

    done: set[str] = set()
    here, there = prepared(str(documents), "here"), prepared(f"file://{documents}/", "there")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"here{suffix}").read_bytes() == (tmp_path / f"there{suffix}").read_bytes()
    recorded = [(record.path.removeprefix("file://"), record.bytes, record.sha256) for record in there.inputs]
    assert recorded == [(record.path, record.bytes, record.sha256) for record in here.inputs]
    assert prepared(f"file://{documents}/", "there") == read_any_manifest(str(tmp_path / "there"))
    (documents / "a.jsonl.gz").write_bytes(igzip.compress(as_line("another") + b"\n"))
    remote_files.forget()
    with pytest.raises(InputError, match="already exists with other inputs"):
        prepared(f"file://{documents}/", "there")


def test_a_store_that_fails_now_and_then_changes_nothing(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", 4096)
    plan = Plan(0.3, seed=4)
    with planned(documents, plan) as url:
        for here, there in zip(expand_inputs([documents]), expand_inputs([f"{url}/"]), strict=True):
            one, other = DocumentFile(here), DocumentFile(there)
            blocks = [[parse_block(block, DocumentParser()) for block in file.blocks()] for file in (one, other)]
            assert blocks[0] == blocks[1]
            assert (one.sha256, one.bytes_read) == (other.sha256, other.bytes_read)
    assert plan.faults > 20


@pytest.mark.parametrize("length", [1, 37, 1000, 3001, 1 << 20])
def test_reads_across_what_is_requested_ahead_are_short_at_the_end_alone(
    length: int, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", 250)
    content = bytes(range(256)) * 40
    (documents / "d.jsonl").write_bytes(content)
    (file,) = expand_inputs([f"file://{documents}/d.jsonl"])
    assert isinstance(file, RemoteInput)
    for first in (0, 999):
        stream = file.open()
        stream.seek(first)
        wanted = [content[at : at + length] for at in range(first, len(content), length)]
        assert list(iter(lambda: stream.read(length), b"")) == wanted  # noqa: B023


def test_parquet_is_read_across_what_is_requested_ahead(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger file than that: pyarrow takes a read that is short for the end of the file."""
    monkeypatch.setattr(remote_files, "PART_BYTES", 1000)
    (file,) = expand_inputs([f"file://{documents}/b.parquet"])
    found = [one.text for block in DocumentFile(file).blocks() for one in parse_block(block, DocumentParser())]
    assert found == [f"row {number}" for number in range(5000)]


def test_files_are_named_as_those_here_are(documents: Path, tmp_path: Path) -> None:
    with planned(documents) as url:
        (tmp_path / "list").write_text(f"{url}/b.parquet\n{documents}/below/c.jsonl\n")
        assert list(map(str, expand_inputs([f"@{tmp_path}/list"]))) == [
            f"{documents}/below/c.jsonl",
            f"{url}/b.parquet",
        ]
        assert list(map(str, expand_inputs([f"{url}/*.gz"]))) == [f"{url}/a.jsonl.gz"]
        for words, line in {
            f"{url}/none.jsonl": "does not exist; name an existing document file, or a folder with / at its end",
            f"{url}/none/": "holds no document file",
            f"{url}/own.csv": "is not a document file",
            "s3://user:secret@bucket/a.jsonl": "an input is s3://…@bucket/a.jsonl and holds a password",
        }.items():
            with pytest.raises(InputError, match=re.escape(line)):
                expand_inputs([words])
        with pytest.raises(InputError, match="is named twice among the inputs"):
            expand_inputs([f"{url}/a.jsonl.gz", f"{url}/*.gz"])


def test_a_file_is_no_pattern_whatever_its_name(documents: Path) -> None:
    for name in ("part[1].jsonl", "part1.jsonl", "what?.jsonl", "whats.jsonl"):
        (documents / name).write_bytes(as_line(name))
    with planned(documents) as url:
        for name, patterns in {"part[1].jsonl": ["part1.jsonl"], "what?.jsonl": ["whats.jsonl"]}.items():
            (file,) = expand_inputs([f"{url}/{name}"])
            assert str(file) == f"{url}/{name}"
            (block,) = DocumentFile(file).blocks()
            assert [document.text for document in parse_block(block, DocumentParser())] == [name]
            (documents / name).rename(documents / "gone")
            remote_files.forget()
            assert list(map(str, expand_inputs([f"{url}/{name}"]))) == [f"{url}/{each}" for each in patterns]
