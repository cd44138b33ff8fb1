import json
from typing import Any

import pyarrow
import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare import documents
from megatron_fanformer.prepare.documents import Document, DocumentParser, Refusal

PARSER = DocumentParser()


def text_of(outcome: Document | Refusal) -> str:
    assert isinstance(outcome, Document)
    return outcome.text


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
    assert PARSER.parse(line) == Refusal(reason)


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
    assert text_of(PARSER.parse(line)) == text


def test_the_text_field_has_the_name_that_is_asked_for() -> None:
    assert text_of(DocumentParser("content").parse(b'{"text": "no", "content": "yes"}')) == "yes"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"a": {"b": {"c": "nested"}}}, "nested"),
        ({"a.b.c": "exact", "a": {"b": {"c": "nested"}}}, "exact"),
        ({"a": [1], "a.b.c": "exact"}, "exact"),
        ({"a": {"b": {"c": ""}}}, documents.EMPTY_TEXT),
        ({"a": {"b": {"c": 1}}}, documents.TEXT_NOT_A_STRING),
        ({"a": {"b": "c"}}, documents.NO_TEXT_FIELD),
        ({"a": {"b.c": "c"}}, documents.NO_TEXT_FIELD),
    ],
)
def test_a_text_field_may_be_a_field_of_objects(fields: dict[str, Any], expected: str) -> None:
    line = json.dumps({"id": 1, "other": {"c": "no"}, **fields, "source": "web"})
    for each in (line, line[:-1] + ', "n": NaN}'):  # which the first parse does not take
        outcome = DocumentParser("a.b.c").parse(each.encode())
        assert outcome in (Document(expected, "1", "web"), Refusal(expected))
    nested = json.dumps({"id": "a", "source": {"text": "t"}}).encode()
    assert DocumentParser("source.text").parse(nested) == Document("t", "a", None)


def test_a_text_field_that_no_json_key_can_match_is_an_input_error() -> None:
    with pytest.raises(InputError, match="text_field"):
        DocumentParser('a"b')


@pytest.mark.parametrize(
    ("fields", "id", "source"),
    [
        (b'"id": "a", "source": "web"', "a", "web"),
        (b"", None, None),
        (b'"id": 7, "source": null', "7", None),
        (b'"id": {"a": [1]}, "source": "\\ud800"', '{"a": [1]}', "?"),
        (b'"id": "\\u00e9"', "\u00e9", None),
    ],
)
def test_id_and_source_are_kept_as_text(fields: bytes, id: str | None, source: str | None) -> None:
    line = b'{"text": "t"' + (b", " + fields if fields else b"") + b"}"
    assert PARSER.parse(line) == Document("t", id, source)


@pytest.mark.parametrize("field", ["id", "source"])
def test_the_text_may_stand_in_the_field_of_id_or_source(field: str) -> None:
    """Then documents have no id, or no source, whichever way they are read."""
    parser = DocumentParser(field)
    expected = Document("the text", *("other" if name != field else None for name in ("id", "source")))
    values = {"id": "other", "source": "other", field: "the text", f"{field} ": "no"}
    line = json.dumps(values)
    for each in (line, line[:-1] + ', "n": NaN}'):  # which the first parse does not take
        assert parser.parse(each.encode()) == expected
    assert parser.parse_rows({name: pyarrow.array([value]) for name, value in values.items()}) == [expected]


@pytest.mark.parametrize(
    ("text", "source", "reason"),
    [
        ("ab", "web", documents.SHORTER),
        ("\u00e9\u00e9\u00e9", "web", None),  # lengths count characters, not bytes
        ("abcdef", "web", None),
        ("abcdefg", "web", documents.LONGER),
        ("abcd", "books", documents.OTHER_SOURCE),
        ("abcd", None, documents.OTHER_SOURCE),
    ],
)
def test_documents_are_let_in_by_length_and_source(text: str, source: str | None, reason: str | None) -> None:
    parser = DocumentParser(min_length=3, max_length=6, sources=["web", "wiki"])
    expected = Document(text, None, source) if reason is None else Refusal(reason)
    assert parser.judge(text, None, source) == expected
