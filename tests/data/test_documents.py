import gzip
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron_fanformer.data import documents
from megatron_fanformer.data.documents import (
    DocumentFile,
    DocumentParser,
    Refusal,
    expand_inputs,
    read_documents,
)
from megatron_fanformer.errors import CorruptError, InputError
from tests.data.making import as_line

WriteLines = Callable[[str, Iterable[bytes]], Path]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', documents.NOT_JSON),
        (b"[" * 100_000, documents.NOT_JSON),
        (b'["text"]', documents.NOT_AN_OBJECT),
        (b'{"id": "1"}', documents.NO_TEXT_FIELD),
        (b'{"text": 1}', documents.TEXT_NOT_A_STRING),
        (b'{"text": null}', documents.TEXT_NOT_A_STRING),
        (b'{"text": ""}', documents.EMPTY_TEXT),
        (b"", documents.EMPTY_LINE),
        (b" \r", documents.EMPTY_LINE),
        (b'{"text": "\xff"}', documents.INVALID_UTF8),
        (b'{"text": "\\ud800"}', documents.UNPAIRED_SURROGATE),
    ],
)
def test_a_line_that_is_no_document_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    assert DocumentParser().parse(line) == Refusal(reason)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a\\u0000\\t\\r\\n "}', "a\0\t\r\n "),
        (b'{"text": "\\ud83d\\ude00"}\r', "\U0001f600"),
        (b'\xef\xbb\xbf{"text": "after a byte order mark"}', "after a byte order mark"),
        (b'{"text": "a", "metadata": {"score": NaN}}', "a"),
    ],
)
def test_a_documents_text_comes_out_as_it_is(line: bytes, text: str) -> None:
    assert DocumentParser().parse(line) == text


def test_the_text_field_has_the_name_that_is_asked_for() -> None:
    assert DocumentParser("content").parse(b'{"text": "no", "content": "yes"}') == "yes"


def test_a_text_field_that_no_json_key_can_match_is_an_input_error() -> None:
    with pytest.raises(InputError, match="text_field"):
        DocumentParser('a"b')


def test_all_members_of_a_concatenated_gzip_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(as_line(text) + b"\n") for text in ("one", "two")))
    assert list(read_documents(path)) == ["one", "two"]


def test_lines_longer_than_a_block_stay_whole(write_lines: WriteLines) -> None:
    lines = [as_line("x" * length) for length in (1, 500, 3, 1000)]
    path = write_lines("long.jsonl.gz", lines)
    blocks = list(DocumentFile(path).blocks(block_bytes=64))
    assert [line for block in blocks for line in documents.split_lines(block)] == lines


def test_a_last_line_without_line_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "open.jsonl"
    path.write_bytes(as_line("a") + b"\n" + as_line("b"))
    assert list(read_documents(path)) == ["a", "b"]


def test_bytes_and_hash_are_those_of_the_file_on_disk(write_lines: WriteLines) -> None:
    import hashlib

    path = write_lines("a.jsonl.gz", [as_line("text")] * 1000)
    file = DocumentFile(path)
    list(file.blocks())
    assert (file.bytes_read, file.sha256) == (
        path.stat().st_size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


@pytest.mark.parametrize("damage", ["truncated", "flipped", "plain text", "followed by rubbish"])
def test_a_damaged_gzip_file_is_corrupt_and_named(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b"".join(as_line(str(number) * 50) + b"\n" for number in range(1000)))
    middle = len(whole) // 2
    data = {
        "truncated": whole[:-20],
        "flipped": whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 8]) + whole[middle + 8 :],
        "plain text": as_line("not compressed") * 100,
        "followed by rubbish": whole + b"rubbish that is no gzip member",
    }[damage]
    path = tmp_path / "damaged.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"damaged\.jsonl\.gz"):
        list(read_documents(path))


def test_folders_stand_for_their_document_files_sorted(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "a/1.json.gz", "b/1.jsonl.gz", "b/notes.txt", "c.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in expand_inputs([tmp_path])]
    assert found == ["a/1.json.gz", "b/1.jsonl.gz", "b/2.jsonl"]


@pytest.mark.parametrize("name", ["missing.jsonl", "empty folder", "notes.txt"])
def test_an_input_that_cannot_serve_is_an_input_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=name):
        expand_inputs([tmp_path / name])


def test_a_file_named_twice_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(InputError, match="twice"):
        expand_inputs([tmp_path, tmp_path / "a.jsonl"])
