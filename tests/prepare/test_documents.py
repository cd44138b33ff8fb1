import gzip
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare import documents
from megatron_fanformer.prepare.documents import DocumentFile, DocumentParser, Refusal, parse_block, read_documents
from tests.prepare.fuzzing import zstd
from tests.prepare.making import WriteLines, as_line

PARSER = DocumentParser()


def test_a_text_field_that_no_json_key_can_match_is_an_input_error() -> None:
    with pytest.raises(InputError, match="text_field"):
        DocumentParser('a"b')


@pytest.mark.parametrize("field", ["id", "source"])
def test_the_text_may_stand_in_the_field_of_id_or_source(field: str) -> None:
    """Then documents have no id, or no source, whichever way they are read."""
    parser = DocumentParser(field)
    expected = documents.Document("the text", *("other" if name != field else None for name in ("id", "source")))
    values = {"id": "other", "source": "other", field: "the text", f"{field} ": "no"}
    line = json.dumps(values)
    for each in (line, line[:-1] + ', "n": NaN}'):  # which the first parse does not take
        assert parser.parse(each.encode()) == expected
    assert parser.parse_rows({name: pyarrow.array([value]) for name, value in values.items()}) == [expected]


def parsed_blocks(path: Path, *block_bytes: int) -> list[list[Any]]:
    """What is on the lines of each block."""
    return [parse_block(block, DocumentParser()) for block in DocumentFile(path, PARSER.columns).blocks(*block_bytes)]


def compress_zstd(data: bytes) -> bytes:
    """With a checksum, as the command line tool writes it: without one, damage may pass."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": compress_zstd}


def test_lines_longer_than_a_block_stay_whole(write_lines: WriteLines) -> None:
    lines = [as_line("x" * length) for length in (1, 500, 3, 1000)]
    path = write_lines("long.jsonl.gz", lines)
    texts = [document.text for block in parsed_blocks(path, 64) for document in block]
    assert texts == ["x" * length for length in (1, 500, 3, 1000)]


def test_bytes_and_hash_are_those_of_the_file_on_disk(tmp_path: Path, write_lines: WriteLines) -> None:
    lines = write_lines("a.jsonl.gz", [as_line("text")] * 1000)
    for path in (lines, write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 1000})):
        file = DocumentFile(path, PARSER.columns)
        list(file.blocks())
        assert (file.bytes_read, file.sha256) == (path.stat().st_size, sha256_of(path))


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("damage", ["in its header", "truncated", "flipped", "plain text", "followed by rubbish"])
def test_a_damaged_compressed_file_is_corrupt_and_named(tmp_path: Path, damage: str, kind: str) -> None:
    lines = b"".join(as_line(hashlib.sha256(bytes([number % 256])).hexdigest()) + b"\n" for number in range(1000))
    whole = COMPRESS[kind](lines)
    middle = len(whole) // 2
    data = {
        "in its header": whole[:3],
        "truncated": whole[:-20],
        "flipped": whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 8]) + whole[middle + 8 :],
        "plain text": as_line("not compressed") * 100,
        "followed by rubbish": whole + b"rubbish that is no member",
    }[damage]
    path = tmp_path / f"damaged.jsonl.{kind}"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"damaged\.jsonl\.{kind}"):
        list(read_documents(path))


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.md"])
def test_a_file_of_nothing_is_empty_only_where_it_says_so(tmp_path: Path, name: str, kind: str) -> None:
    (path := tmp_path / f"{name}.{kind}").write_bytes(COMPRESS[kind](b""))
    list(read_documents(path))
    path.write_bytes(b"")
    with pytest.raises(CorruptError, match=rf"{name}\.{kind} is truncated, its (gzip|zstd) stream has no end; fetch"):
        list(read_documents(path))


@pytest.mark.parametrize("array", [b'[{"text": "a"}, {"text": "b"}]', b'\n[\n {"text": "a"}\n]\n'])
def test_one_array_is_refused(tmp_path: Path, array: bytes) -> None:
    (path := tmp_path / "a.json").write_bytes(array)
    with pytest.raises(InputError, match=r"a.json is one JSON array, .*; write a line for each, by jq -c '\.\[\]'"):
        list(read_documents(path))


def test_lines_of_which_the_first_is_an_array_are_lines(write_lines: WriteLines) -> None:
    path = write_lines("a.jsonl", [b'[{"text": "a"}]', as_line("b")])
    assert list(read_documents(path)) == [Refusal(documents.NOT_AN_OBJECT), "b"]


def test_a_block_is_read_as_its_lines_are_alone() -> None:
    a, part, rest = as_line("a"), b'{"text": "b", "n": [{}', b",{}]}"
    blocks = [
        a + a,
        a + b" " + a + b"\n\n",
        b"\n" + a + a,
        part + b"\n" + rest + a,
        part + b"\n" + rest + b"\n",
    ]
    for block in [*blocks, a + b"\n" + part + b"\n{" + rest + a, a + b"\n" + a + b"x\r\n" + a + b"\n"]:
        assert parse_block(block, PARSER) == list(map(PARSER.parse, block.removesuffix(b"\n").split(b"\n")))


def test_a_line_over_the_limit_is_refused_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 10_000)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"\n".join([as_line("a"), as_line("x" * 30_000), as_line("b"), as_line("y" * 30_000)]))
    refused = Refusal(documents.TOO_LONG_A_LINE)
    ([a], first, [b], second) = parsed_blocks(path, 1000)
    assert (a.text, first, b.text, second) == ("a", [refused], "b", [refused])


def test_a_text_file_is_one_document_of_any_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 10_000)
    text = "\n{\r\n\n\x00 é\n"
    contents = {
        "a.txt": (text.encode(), text),
        "b.md": (b"\xef\xbb\xbf" + text.encode(), text),  # a byte order mark
        "c.md.gz": (gzip.compress(b"x" * 10_000), "x" * 10_000),
        "d.txt.zst": (compress_zstd(b"x" * 10_001), Refusal(documents.TOO_LONG_A_LINE)),
        "e.txt": (b"", Refusal(documents.EMPTY_TEXT)),
        "f.txt": (text.encode("utf-16"), Refusal(documents.INVALID_UTF8)),
    }
    for name, (data, expected) in contents.items():
        (tmp_path / name).write_bytes(data)
        file = DocumentFile(tmp_path / name, PARSER.columns)
        [[found]] = [parse_block(block, DocumentParser()) for block in file.blocks(64)]
        assert (found if isinstance(found, Refusal) else found.text) == expected
        assert isinstance(found, Refusal) or (found.id, found.source) == (str(tmp_path / name), None)
        assert (file.bytes_read, file.sha256) == (len(data), sha256_of(tmp_path / name))


def test_a_compressed_bomb_is_refused_within_bounded_memory(tmp_path: Path) -> None:
    size = 3 * documents.MAX_LINE_BYTES
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    outcomes = list(read_documents(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes == [Refusal(documents.TOO_LONG_A_LINE)]
    # The line up to the limit, and a block more; joining is left out for a line that is not let in.
    assert peak < 1.1 * documents.MAX_LINE_BYTES


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())],
    ids=str,
)
def test_text_in_every_type_of_arrow_is_text(tmp_path: Path, kind: pyarrow.DataType) -> None:
    texts = pyarrow.array(["a", None, "a text beyond the twelve bytes of a view", "a"])
    columns = [{name: column for name in ("text", "id")} for column in (texts, texts.cast(kind))]
    plain, other = (write_parquet(tmp_path / f"{n}.parquet", both) for n, both in enumerate(columns))
    assert parquet.read_schema(other).field("text").type == kind
    assert parsed_blocks(other) == parsed_blocks(plain)


@pytest.mark.parametrize(
    ("columns", "message"), [({"content": ["a"]}, "no column 'text', only content"), ({"text": [1]}, "holds int64")]
)
def test_a_parquet_file_without_text_is_an_input_error(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(InputError, match=message):
        list(read_documents(path))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "rubbish"])
def test_a_damaged_parquet_file_is_corrupt_and_named(tmp_path: Path, damage: str) -> None:
    columns = {"text": [f"text {n}" for n in range(5000)]}
    path = write_parquet(tmp_path / "a.parquet", columns, compression="none", write_page_checksum=True)
    whole = path.read_bytes()
    data = {
        "truncated": whole[: len(whole) // 2],
        "flipped": whole[:2000] + bytes(255 - byte for byte in whole[2000:2200]) + whole[2200:],
        "rubbish": b"rubbish" * 100,
    }[damage]
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"a\.parquet"):
        list(read_documents(path))


def test_a_window_beyond_the_memory_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl.zst"
    options = {zstd.CompressionParameter.window_log: 30, zstd.CompressionParameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    path.write_bytes(compressor.compress(as_line("text")) + compressor.flush())
    with pytest.raises(CorruptError, match=r"long.jsonl.zst is damaged \(.*memory"):
        list(read_documents(path))
