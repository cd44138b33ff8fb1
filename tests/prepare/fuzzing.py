"""Makes hostile document files of which is known, line by line, what must become of them.

Every line is made together with its fate: the text, id and source of the document that it is, or the reason for
which it is refused. The same seed makes the same files.
"""

import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_fanformer.prepare import documents

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@dataclass(frozen=True, kw_only=True)
class FuzzedLine:
    """One line without its line end, and its fate: a text, or a reason."""

    data: bytes
    text: str | None = None
    id: str | None = None
    source: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class FuzzedFile:
    """A document file, and its lines in order."""

    path: Path
    lines: list[FuzzedLine]


Maker = Callable[[random.Random], FuzzedLine]

# Words on which readers of text go wrong: line ends that JSON does not know, controls, joiners, special pieces.
WORDS = (
    *("the", "of", "and", "house", "1234", "3.14", "don't", "__init__", "(x)", "{}", "[]", "\\", '"', "'", "/"),
    *("<|endoftext|>", "<unk>", "<0x41>", "▁", "▁▁", "straße", "naïve", "café", "e\u0301", "\u212b", "\ufb01", "Ω"),
    *("日本語", "漢字", "한국어", "\u1100\u1161", "עברית", "العربية", "हिन्दी", "ไทย", "👍🏽", "🏳\ufe0f\u200d🌈"),
    *("\x00", "\x01", "\x0b", "\x0c", "\x1c", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff", "\u200d", "\ufffd"),
    *("\n", "\r\n", "\r", "\t", "   ", "\u3000", "\xa0", "\U0010ffff", "\ue000", "a" * 300, "!?" * 40, "é" * 50),
)
# An id or a source as it stands in JSON, and as it must come out: text that no file format can hold is replaced.
NAMES: tuple[tuple[str, str | None], ...] = (
    *(('"doc-1"', "doc-1"), ('""', ""), ('" "', " "), ('"é\\u00e9"', "éé"), ('"\\ud83d\\ude00"', "\U0001f600")),
    *(('"\\ud800"', "?"), ('"a\\udfffb"', "a?b"), ('"\\u0000"', "\x00"), ('"a\\nb"', "a\nb"), ("null", None)),
    *(("7", "7"), ("-0", "0"), ("true", "true"), ("1.50", "1.5"), ("1e2", "100.0"), ("1e999", "Infinity")),
    *(("18446744073709551616123", "18446744073709551616123"), ("NaN", "NaN"), ("[1,\t2]", "[1, 2]")),
    *(('{"b":{"c":null}}', '{"b": {"c": null}}'), ('{"k":"é"}', '{"k": "\\u00e9"}'), ('["\\ud800"]', '["\\ud800"]')),
)
# Values of fields that nobody reads: they must not matter, however odd.
EXTRAS = (
    *("1", "null", "[]", "{}", '"x"', "1e999", "-1E-999", "9" * 5000, "NaN", "-Infinity", '"\\ud800"', '{"text":"no"}'),
    *('["a",{"b":[1,2,{"id":3}]}]', '"\\"text\\":\\"no\\""', "[" * 200 + "]" * 200, '"\\u0000"', f'"{"x" * 9000}"'),
)
NOT_TEXTS = ("null", "1", "1.5", "true", "false", "[]", "{}", '["a"]', '{"text":"a"}', "NaN", "1e999")
NOT_OBJECTS = ("null", "true", "1", "-1.5e3", '"text"', '{"text":"a"}'.join("[]"), "[]", "NaN", '"\\ud800"')
NOT_JSON = (
    *("{", "}", "[", '"', "{]", "nul", "x", "\x00", "{'text':'a'}", '{"text":"a",}', '{"text" "a"}', '{"text":"a"'),
    *('{"text":"a"}}', '{"text":"a"} {"text":"b"}', '{"text":"a"}\x00', '{text:"a"}', '{"text":"a","n":01}'),
    *('{"text":"a\x00b"}', '{"text":"a\tb"}', '{"text":"\\x41"}', '{"text":"\\u12"}', '{"text":"a","n":+1}', "//"),
    *('{"text":"a","n":1.}', '{"text":"a","n":"\x01"}', '{"text":undefined}', "1 2", "\ufeff", "\ufeff\ufeff{}", "--"),
    *('{"text":"a","x":' + "[" * 100_000 + "]" * 100_000 + "}", "[" * 100_000, '{"a":' * 100_000, "{}{}", "\xa0"),
)
EMPTY_LINES = ("", " ", "\t", "  \t ", "\r", "\x0c")
NOT_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf5\x80\x80\x80", b"\xc0\x80", b"\xe2\x82", b"\x80")
LONE_SURROGATES = ("\\ud800", "\\udfff", "\\ud800\\ud800", "\\udc00\\ud800", "\\ud83dx", "\\ud83d\\u0041")


def some_text(chance: random.Random) -> str:
    """A text of at least one character; one in fifty is long."""
    words = chance.randrange(500, 4_000) if chance.random() < 0.02 else chance.randrange(1, 30)
    return chance.choice((" ", "", "\n")).join(chance.choices(WORDS, k=words))


def _in_json(chance: random.Random, text: str) -> str:
    return json.dumps(text, ensure_ascii=chance.random() < 0.5)


def _object(chance: random.Random, fields: list[tuple[str, str]], *, shuffle: bool = True) -> bytes:
    """An object of these members and odd ones, in any order; the values are JSON already."""
    extras = [(f"extra{n}", chance.choice(EXTRAS)) for n in range(chance.choice((0, 0, 1, 3)))]
    members = [*extras, *fields] if chance.random() < 0.5 else [*fields, *extras]
    if shuffle:
        chance.shuffle(members)
    space = chance.choice(("", " ", "\t"))
    body = ("," + space).join(f'"{name}"{space}:{space}{value}' for name, value in members)
    bom = "\ufeff" if chance.random() < 0.02 else ""
    return f"{bom}{space}{{{body}}}{space}".encode()


def _named(chance: random.Random) -> tuple[list[tuple[str, str]], dict[str, str | None]]:
    """Members id and source, or one, or none; and what they must come out as."""
    members, names = [], {}
    for name in ("id", "source"):
        if chance.random() < 0.9:
            value, names[name] = chance.choice(NAMES)
            members.append((name, value))
    return members, names


def _document(chance: random.Random) -> FuzzedLine:
    text = some_text(chance)
    members, names = _named(chance)
    key = "t\\u0065xt" if chance.random() < 0.05 else "text"
    return FuzzedLine(data=_object(chance, [(key, _in_json(chance, text)), *members]), text=text, **names)


def _document_of_two_texts(chance: random.Random) -> FuzzedLine:
    text = some_text(chance)
    before = [("text", chance.choice(('"other"', '""', "null", "1")))]
    return FuzzedLine(data=_object(chance, [*before, ("text", _in_json(chance, text))], shuffle=False), text=text)


def _pair_of_surrogates(chance: random.Random) -> FuzzedLine:
    return FuzzedLine(data=_object(chance, [("text", '"\\ud83d\\ude00\\uD83D\\uDE00"')]), text="\U0001f600" * 2)


def _other_members(chance: random.Random) -> FuzzedLine:
    near = [(chance.choice(("Text", "text ", "texts", "")), '"a"')] if chance.random() < 0.5 else []
    return FuzzedLine(data=_object(chance, [*near, *_named(chance)[0]]), reason=documents.NO_TEXT_FIELD)


def _one_of(lines: Sequence[str], reason: str) -> Maker:
    return lambda chance: FuzzedLine(data=chance.choice(lines).encode(), reason=reason)


def _cut_short(chance: random.Random) -> FuzzedLine:
    whole = json.dumps({"id": "1", "text": some_text(chance)}).encode()
    return FuzzedLine(data=whole[: chance.randrange(1, len(whole))], reason=documents.NOT_JSON)


def _not_utf8(chance: random.Random) -> FuzzedLine:
    form = chance.choice((b'{"text": "ab%scd"}', b'{"text": "a", "id": "%s"}', b"%s", b'\xff\xfe{"text": "%s"}'))
    return FuzzedLine(data=form % chance.choice(NOT_UTF8), reason=documents.INVALID_UTF8)


def _unread_bytes(chance: random.Random) -> FuzzedLine:
    return FuzzedLine(data=b'{"text": "a", "other": "%s"}' % chance.choice(NOT_UTF8), text="a")


def _lone_surrogate(chance: random.Random) -> FuzzedLine:
    data = b'{"text": "a%sb"}' % chance.choice(LONE_SURROGATES).encode()
    return FuzzedLine(data=data, reason=documents.UNPAIRED_SURROGATE)


# How often, in a hundred lines.
KINDS: dict[Maker, int] = {
    _document: 60,
    _document_of_two_texts: 3,
    _pair_of_surrogates: 2,
    _other_members: 4,
    # No extras: a number that Python does not read would make it another reason's.
    _one_of([f'{{"text": {value}}}' for value in NOT_TEXTS], documents.TEXT_NOT_A_STRING): 4,
    _one_of(['{"id": "1", "text": ""}'], documents.EMPTY_TEXT): 3,
    _one_of(NOT_OBJECTS, documents.NOT_AN_OBJECT): 3,
    _one_of(NOT_JSON, documents.NOT_JSON): 4,
    _cut_short: 4,
    _one_of(EMPTY_LINES, documents.EMPTY_LINE): 5,
    _not_utf8: 4,
    _unread_bytes: 1,
    _lone_surrogate: 3,
}


def fuzzed_lines(chance: random.Random, number: int) -> list[FuzzedLine]:
    """Lines of all kinds."""
    return [make(chance) for make in chance.choices(list(KINDS), list(KINDS.values()), k=number)]


# -- files


def joined(chance: random.Random, lines: Sequence[FuzzedLine]) -> bytes:
    """The lines with their ends, LF or CRLF; the last one perhaps without."""
    ends = chance.choices((b"\n", b"\r\n"), (4, 1), k=len(lines))
    if chance.random() < 0.5 and lines and lines[-1].data:
        ends[-1] = b""
    return b"".join(line.data + end for line, end in zip(lines, ends, strict=True))


def _pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """The data cut anywhere, within lines and characters too; some pieces are empty."""
    cuts = sorted([0, len(data), *(chance.randrange(len(data) + 1) for _ in range(20)), len(data) // 2, len(data) // 2])
    return [data[start:end] for start, end in pairwise(cuts)]


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def _skippable_frame(data: bytes) -> bytes:
    return b"\x53\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


Container = Callable[[random.Random, bytes], bytes]
CONTAINERS: dict[str, Container] = {
    "plain.jsonl": lambda chance, data: data,
    "plain.json": lambda chance, data: data,
    "whole.json.gz": lambda chance, data: _gzip(data),
    "members.jsonl.gz": lambda chance, data: b"".join(map(_gzip, _pieces(chance, data))),
    "padded.jsonl.gz": lambda chance, data: _gzip(data) + bytes(512),  # tapes and some stores pad with zeros
    "whole.jsonl.zst": lambda chance, data: zstd.compress(data),
    "frames.ndjson.zst": lambda chance, data: b"".join(map(zstd.compress, _pieces(chance, data))),
    "skipped.jsonl.zst": lambda chance, data: (
        _skippable_frame(b"a table") + zstd.compress(data) + _skippable_frame(b"")
    ),
}


def write_fuzzed(folder: Path, number: int, seed: int) -> list[FuzzedFile]:
    """About `number` lines in files of every kind, in the order in which they are to be read."""
    chance = random.Random(seed)
    share = number // (len(CONTAINERS) + 1) + 1
    files = []
    for name, contain in CONTAINERS.items():
        lines = fuzzed_lines(chance, share)
        (folder / f"000-{name}").write_bytes(contain(chance, joined(chance, lines)))
        files.append(FuzzedFile(folder / f"000-{name}", lines))
    files.append(_parquet_file(chance, folder / "000.parquet", share))
    return sorted(files, key=lambda file: file.path)


def _parquet_file(chance: random.Random, path: Path, number: int) -> FuzzedFile:
    import pyarrow
    from pyarrow import parquet

    texts, ids, sources, lines = zip(*(_row(chance, row) for row in range(number)), strict=True)
    binary = pyarrow.array(texts, pyarrow.binary())
    # Its bytes under the name of text, checked by nobody: so a file can hold what is no text.
    text = pyarrow.Array.from_buffers(pyarrow.string(), number, binary.buffers(), binary.null_count)
    columns: dict[str, Any] = {"before": pyarrow.nulls(number), "text": text, "id": ids, "source": sources}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=max(1, number // 3), compression="zstd")
    return FuzzedFile(path, list(lines))


def _row(chance: random.Random, number: int) -> tuple[bytes | None, int | None, str | None, FuzzedLine]:
    id, source = chance.choice((None, number)), chance.choice((None, "", "a", "ü"))
    if chance.random() < 0.85:
        text = some_text(chance)
        line = FuzzedLine(data=b"", text=text, id=None if id is None else str(id), source=source)
        return text.encode(), id, source, line
    content, reason = chance.choice(NO_TEXTS)
    return content, id, source, FuzzedLine(data=b"", reason=reason)


NO_TEXTS = ((None, documents.TEXT_NOT_A_STRING), (b"", documents.EMPTY_TEXT), (b"a\xff", documents.INVALID_UTF8))
