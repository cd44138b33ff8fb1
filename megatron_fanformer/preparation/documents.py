"""Documents in Dolma's format: JSON objects with a text, an id and a source.

A line (in a Parquet file, a row) is either a document or refused with a reason; none is dropped silently.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from megatron_fanformer.errors import InputError

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_TEXT_FIELD = "no text field"
TEXT_NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"
EMPTY_LINE = "empty line"
INVALID_UTF8 = "invalid UTF-8"
UNPAIRED_SURROGATE = "unpaired surrogate in the text"
TOO_LONG_A_LINE = "line too long"
TOO_LONG_TO_LOOK_AGAIN = "irregular, and too long to be looked at again"
SHORTER = "shorter than min_length"
LONGER = "longer than max_length"
OTHER_SOURCE = "source left out"

# The first parse of a line builds only what is needed; a second one everything in it, up to 25 times its bytes.
LOOK_AGAIN_BYTES = 8 << 20
# The most digits of an integer that Python parses (sys.int_info.default_max_str_digits).
MAX_DIGITS = 4300

# What an id or a source may be in the first parse, which must not build anything large: others get the second.
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Refusal:
    """Why a line is not a document; one of this module's reasons."""

    reason: str


class Document(NamedTuple):
    """The fields of a document that are kept."""

    text: str
    id: str | None
    source: str | None


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """The field that holds a document's text, and the rules by which documents are kept."""

    text_field: str = "text"
    min_length: int = 0
    """In characters."""
    max_length: int | None = None
    """In characters; None: no limit."""
    sources: frozenset[str] | None = None
    """The values of the `source` field that are kept; None: all, including documents without one."""

    @property
    def choose(self) -> bool:
        """Return whether any valid document can be left out."""
        return bool(self.min_length or self.max_length is not None or self.sources is not None)


class DocumentParser:
    """Extracts text, id and source from one line; builds nothing else of the JSON object.

    Raises InputError for a `text_field` that holds a quote, a backslash or a control character.
    """

    def __init__(self, rules: DocumentRules) -> None:
        self._rules = rules
        self._choose = rules.choose
        fields: list[Any] = [("text", str), ("id", Scalar, None), ("source", Scalar, None)]
        names = {"text": rules.text_field}
        if rules.text_field in ("id", "source"):  # then that is the text, and there is no id or no source
            names[rules.text_field] = f"{rules.text_field}\x20"
        try:
            line = msgspec.defstruct("Line", fields, rename=names)
        except ValueError as error:
            raise InputError(f"text_field {rules.text_field!r} cannot be a field name: {error}") from error
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode

    @property
    def text_field(self) -> str:
        """Return the name of the field that holds the text."""
        return self._rules.text_field

    def parse(self, line: bytes) -> Document | Refusal:
        """Return the document on `line` (without or with its line end), or why there is none."""
        try:
            fields = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._look_again(line)
        return self.judge(fields.text, fields.id, fields.source)

    def judge(self, text: str, id: Any, source: Any) -> Document | Refusal:
        """Return the document of these values, or why it is refused."""
        if not text:
            return Refusal(EMPTY_TEXT)
        document = Document(text, as_text(id), as_text(source))
        return self._left_out(document) or document if self._choose else document

    def _left_out(self, document: Document) -> Refusal | None:
        rules = self._rules
        if len(document.text) < rules.min_length:
            return Refusal(SHORTER)
        if rules.max_length is not None and len(document.text) > rules.max_length:
            return Refusal(LONGER)
        if rules.sources is not None and document.source not in rules.sources:
            return Refusal(OTHER_SOURCE)
        return None

    def _look_again(self, line: bytes) -> Document | Refusal:
        fields = decoded_again(line)
        if isinstance(fields, Refusal):
            return fields
        if not isinstance(fields, dict):
            return Refusal(NOT_AN_OBJECT)
        if self.text_field not in fields:
            return Refusal(NO_TEXT_FIELD)
        text = fields[self.text_field]
        if not isinstance(text, str):
            return Refusal(TEXT_NOT_A_STRING)
        if has_surrogate(text):
            return Refusal(UNPAIRED_SURROGATE)
        return self.judge(text, fields.get("id"), fields.get("source"))


def decoded_again(line: bytes) -> Any:
    """Return the value of a line that is irregular, or the Refusal that names the reason.

    The standard library also accepts what Python's own writer emits (NaN, Infinity).
    """
    if not line.strip():
        return Refusal(EMPTY_LINE)
    if len(line) > LOOK_AGAIN_BYTES:
        return Refusal(TOO_LONG_TO_LOOK_AGAIN)
    try:
        return json.loads(line.decode("utf-8-sig"), parse_int=_integer)
    except UnicodeDecodeError:
        return Refusal(INVALID_UTF8)
    except (ValueError, RecursionError):
        return Refusal(NOT_JSON)


def has_surrogate(text: str) -> bool:
    """Return whether a text contains an unpaired surrogate, which UTF-8 cannot encode."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _integer(digits: str) -> int | float:
    """An integer; as a float where it has too many digits for Python to parse: the text beside it is still good."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def as_text(value: Any) -> str | None:
    """Return an id or a source as text: other types as JSON, an unpaired surrogate replaced."""
    if value is None or value == b"":
        return None
    if type(value) is str and value.isascii():
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")
