"""Documents in Dolma's format, JSON objects with a text, an id and a source; and conversations, objects with messages.

A line (in a Parquet file, a row; a text file as a whole) is either a document or refused with a reason; none is
dropped silently. Conversations come in the forms that data sets of chats have:

    messages        a list of objects with `role` and `content`; beside it, `tools` that may be called
    conversations   a list of objects with `from` (human, gpt, system) and `value`
    prompt          with `completion`: two texts, or two lists of messages
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from megatron_fanformer.data.chat_template import ASSISTANT, Message, function_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.inputs import InputFile

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_TEXT_FIELD = "no text field"
TEXT_NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"
EMPTY_LINE = "empty line"
INVALID_UTF8 = "invalid UTF-8"
UNPAIRED_SURROGATE = "unpaired surrogate in the text"
TOO_LONG_TO_LOOK_AGAIN = "irregular, and too long to be looked at again"
SHORTER = "shorter than min_length"
LONGER = "longer than max_length"
OTHER_SOURCE = "source left out"

# A longer line or text file is refused. Its text may take four times its bytes, and its ids as much again.
MAX_LINE_BYTES = 128 << 20
TOO_LONG_A_LINE = f"above {MAX_LINE_BYTES >> 20} MiB"
# The first parse of a line builds only what is needed; a second one everything in it, up to 25 times its bytes.
LOOK_AGAIN_BYTES = 8 << 20
# The most digits of an integer that Python parses (sys.int_info.default_max_str_digits); the text beside it is good.
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


class DocumentParser:
    """Extracts text, id and source from one line or row; builds nothing else of the JSON object.

    Args:
        text_field: the field (the column) that holds the text; if it is `id` or `source`, documents have none. On a
            line without a text as `a.b`, it is the field `b` of the object `a`.
        min_length: the fewest characters of a document that is kept.
        max_length: the most; None: no limit.
        sources: the values of the `source` field that are kept; None: all, including documents without one.

    Raises InputError for a `text_field` that holds a quote, a backslash or a control character.
    """

    def __init__(
        self,
        text_field: str = "text",
        *,
        min_length: int = 0,
        max_length: int | None = None,
        sources: Collection[str] | None = None,
    ) -> None:
        self._text_field, self._path = text_field, text_field.split(".")
        self._min_length, self._max_length = min_length, max_length
        self._sources = None if sources is None else frozenset(sources)
        self._beside = [name for name in ("id", "source") if name != self._path[0]]  # what is the text is neither
        try:
            lines = [_object_type(path, self._beside) for path in ([text_field], self._path)[: len(self._path)]]
        except ValueError as error:
            raise InputError(f"text_field {text_field!r} cannot be a field name: {error}") from error
        self._decoders: list[Callable[[bytes], Any]] = [msgspec.json.Decoder(line).decode for line in lines]

    def parse(self, line: bytes) -> Document | Refusal:
        """Return the document on `line` (without or with its line end), or why there is none."""
        for decode in self._decoders:
            try:
                fields = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            return self.judge(fields.text, fields.id, fields.source)
        return self._look_again(line)

    def parse_text(self, data: bytes, id: str) -> Document | Refusal:
        """Return the document that a text file is, without a byte order mark, or why it is none."""
        try:
            return self.judge(data.decode("utf-8-sig"), id, None)
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Document | Refusal]:
        """Return the document in each row of a Parquet file, or why there is none; `columns` are pyarrow arrays."""
        texts = _values(columns[self._text_field])
        beside = {name: _values(columns[name]) for name in self._beside if name in columns}
        nothing = [None] * len(texts)
        ids, sources = (beside.get(name, nothing) for name in ("id", "source"))
        return [self._parse_row(*row) for row in zip(texts, ids, sources, strict=True)]

    def _parse_row(self, text: Any, id: Any, source: Any) -> Document | Refusal:
        if not isinstance(text, str):
            return Refusal(INVALID_UTF8 if text == b"" else TEXT_NOT_A_STRING)
        return Refusal(TOO_LONG_A_LINE) if len(text) > MAX_LINE_BYTES else self.judge(text, id, source)

    def judge(self, text: str, id: Any, source: Any) -> Document | Refusal:
        """Return the document of these values, or why it is refused."""
        if not text:
            return Refusal(EMPTY_TEXT)
        if len(text) < self._min_length:
            return Refusal(SHORTER)
        if self._max_length is not None and len(text) > self._max_length:
            return Refusal(LONGER)
        document = Document(text, as_text(id), as_text(source))
        if self._sources is not None and document.source not in self._sources:
            return Refusal(OTHER_SOURCE)
        return document

    def _look_again(self, line: bytes) -> Document | Refusal:
        fields = decoded_again(line)
        if isinstance(fields, Refusal):
            return fields
        text: Any = fields
        for name in [self._text_field] if isinstance(fields.get(self._text_field), str) else self._path:
            if not isinstance(text, dict) or name not in text:
                return Refusal(NO_TEXT_FIELD)
            text = text[name]
        if not isinstance(text, str):
            return Refusal(TEXT_NOT_A_STRING)
        if has_surrogate(text):
            return Refusal(UNPAIRED_SURROGATE)
        beside = {name: fields.get(name) for name in self._beside}
        return self.judge(text, beside.get("id"), beside.get("source"))


def _object_type(path: Sequence[str], beside: Sequence[str] = ()) -> Any:
    """Return the type of objects with a text at a path of fields, which is their `text`; and with fields beside it."""
    inner = _object_type(path[1:]) if len(path) > 1 else str
    attributes: dict[str, Any] = {name: None for name in ("id", "source") if name not in beside}
    field = "text"
    if len(path) > 1:
        field, attributes["text"] = "inner", property(lambda line: line.inner.text)
    fields: list[Any] = [(field, inner), *((name, Scalar, None) for name in beside)]
    return msgspec.defstruct("Line", fields, rename={field: path[0]}, namespace=attributes)


def text_columns(path: InputFile, schema: Any, text_field: str = "text") -> list[str]:
    """Return the columns of a Parquet file to read. Raises InputError if there is no text column of that name."""
    import pyarrow

    names: Sequence[str] = schema.names
    if text_field not in names:
        raise InputError(f"{path} has no column {text_field!r}, only {', '.join(names)}; name one as text_field")
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise InputError(f"column {text_field!r} of {path} holds {kind}, not text; name another as text_field")
    columns = [name for name in dict.fromkeys((text_field, "id", "source")) if name in names]
    return [
        name for name in columns if not pyarrow.types.is_nested(schema.field(name).type)
    ]  # neither names a document


def _values(column: Any) -> list[Any]:
    """Return the values of a column; b"" for bytes that are not valid UTF-8 in a text column."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        singles = (column.slice(row, 1) for row in range(len(column)))
        return [b""] if len(column) == 1 else [value for single in singles for value in _values(single)]


def decoded_again(line: bytes) -> dict[str, Any] | Refusal:
    """Return the object on a line that is irregular, or why there is none.

    The standard library also accepts what Python's own writer emits (NaN, Infinity).
    """
    if not line.strip():
        return Refusal(EMPTY_LINE)
    if len(line) > LOOK_AGAIN_BYTES:
        return Refusal(TOO_LONG_TO_LOOK_AGAIN)
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_int=lambda n: int(n) if len(n) <= MAX_DIGITS else float(n))
    except UnicodeDecodeError:
        return Refusal(INVALID_UTF8)
    except (ValueError, RecursionError):
        return Refusal(NOT_JSON)
    return value if isinstance(value, dict) else Refusal(NOT_AN_OBJECT)


def has_surrogate(text: str) -> bool:
    """Return whether a text contains an unpaired surrogate, which UTF-8 cannot encode."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def as_text(value: Any) -> str | None:
    """Return an id or a source as text: other types as JSON, an unpaired surrogate replaced."""
    if value is None or value == b"":
        return None
    if type(value) is str and value.isascii():
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


# -- conversations

TOO_LONG_A_CHAT = f"above {LOOK_AGAIN_BYTES >> 20} MiB"
NO_MESSAGES_FIELD = "no messages, conversations, or prompt and completion"
NOT_MESSAGES = "messages are not a list of objects with a role and a content"
CONTENT_NOT_A_STRING = "content is not a string, or parts of text"
PART_NOT_TEXT = "content has a part that is not text"
NO_CONTENT = "no content, and no tool calls"
NO_MESSAGE = "no message"
UNKNOWN_ROLE = "unknown role"
TOOL_CALLS = "tool calls are not a list of functions with a name, of the assistant"
TOOLS = "tools are not a list of functions with a name"
NO_ASSISTANT_TURN = "no assistant turn"
NOT_A_WEIGHT = "weight, train or loss of an answer is neither 0 nor 1"

ROLES = {
    **{role: role for role in ("system", "developer", "user", ASSISTANT, "tool")},
    "human": "user",
    "gpt": ASSISTANT,
}
"""The templates' names for the roles of a data set."""
FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
WEIGHTS = ("weight", "train", "loss")
"""Fields by which data sets say of an answer whether it is learned: 0 or false, else it is."""


class Chat(NamedTuple):
    """The fields of a conversation that are kept."""

    messages: list[Message]
    id: str | None
    source: str | None
    tools: list[dict[str, Any]] | None = None


class _Line(msgspec.Struct):
    """The fields that are read of a line; nothing else of it is built."""

    messages: Any = None
    conversations: Any = None
    prompt: Any = None
    completion: Any = None
    tools: Any = None
    id: Scalar = None
    source: Scalar = None


class ChatParser:
    """Extracts the messages, id and source from one line or row."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode

    def parse(self, line: bytes) -> Chat | Refusal:
        """Return the conversation on `line` (without or with its line end), or why there is none."""
        if len(line) > LOOK_AGAIN_BYTES:  # its objects take up to 25 times the memory
            return Refusal(TOO_LONG_A_CHAT)
        fields: Mapping[str, Any] | Refusal
        try:
            fields = msgspec.structs.asdict(self._decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = decoded_again(line)
        return fields if isinstance(fields, Refusal) else self.judge(fields)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Chat | Refusal]:
        """Return the conversation in each row of a Parquet file, or why there is none; `columns` are pyarrow arrays."""
        return [self._parse_row(columns, row) for row in range(len(next(iter(columns.values()))))]

    def _parse_row(self, columns: Mapping[str, Any], row: int) -> Chat | Refusal:
        try:
            return self.judge({name: _without_nulls(column[row].as_py()) for name, column in columns.items()})
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)

    def judge(self, fields: Mapping[str, Any]) -> Chat | Refusal:
        """Return the conversation of these fields, or why it is refused."""
        try:
            messages = list(map(_message, _stated_messages(fields)))
            if not messages:
                raise _Refused(NO_MESSAGE)
            if all(message["role"] != ASSISTANT for message in messages):
                raise _Refused(NO_ASSISTANT_TURN)
            return Chat(messages, as_text(fields.get("id")), as_text(fields.get("source")), _tools(fields.get("tools")))
        except _Refused as refused:
            return Refusal(str(refused))


class _Refused(Exception):
    """A conversation is refused; the message is the reason."""


def _stated_messages(fields: Mapping[str, Any]) -> Sequence[Any]:
    for name in ("messages", "conversations"):
        stated = fields.get(name)
        if stated is not None:
            if not isinstance(stated, list):
                raise _Refused(NOT_MESSAGES)
            return stated
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if prompt is None or completion is None:
        raise _Refused(NO_MESSAGES_FIELD)
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]


def _message(stated: Any) -> Message:
    if not isinstance(stated, dict):
        raise _Refused(NOT_MESSAGES)
    speaker, content = (
        stated.get(name) if stated.get(name) is not None else stated.get(other)
        for name, other in (("role", "from"), ("content", "value"))
    )
    if not isinstance(speaker, str):
        raise _Refused(NOT_MESSAGES)
    if (role := ROLES.get(speaker)) is None:
        raise _Refused(UNKNOWN_ROLE)
    calls = stated.get("tool_calls")
    if calls and (role != ASSISTANT or not isinstance(calls, list) or None in map(function_of, calls)):
        raise _Refused(TOOL_CALLS)
    if content is None and not calls:
        raise _Refused(NO_CONTENT)
    text = None if content is None else _text(content)
    if role == ASSISTANT and any(stated.get(name) not in (None, 0, 1) for name in WEIGHTS):
        raise _Refused(NOT_A_WEIGHT)
    others = {name: value for name, value in stated.items() if name not in ("from", "value") and value is not None}
    message = {**others, "role": role, "content": text}
    _refuse_surrogates(message)
    return message


def is_learned(answer: Message) -> bool:
    """Return whether an assistant's message is to be learned, by its `WEIGHTS`."""
    return all(answer.get(name) != 0 for name in WEIGHTS)


def _text(content: Any) -> str:
    """Return a content that is a text, or parts of text, one behind the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise _Refused(CONTENT_NOT_A_STRING)
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    kinds = [part.get("type", "text") for part in content if isinstance(part, dict)]
    if any(kind != "text" for kind in kinds) or not all(isinstance(part, str) for part in parts):
        raise _Refused(PART_NOT_TEXT)
    return "".join(parts)


def _tools(stated: Any) -> list[dict[str, Any]] | None:
    """Return the functions that may be called: a list, or its JSON text, as data sets in columns have it."""
    if isinstance(stated, str) and stated.strip():
        try:
            stated = msgspec.json.decode(stated)
        except (msgspec.MsgspecError, RecursionError):
            raise _Refused(TOOLS) from None
    if stated is None or stated == "":
        return None
    if not isinstance(stated, list) or None in map(function_of, stated):
        raise _Refused(TOOLS)
    _refuse_surrogates(stated)
    return stated


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: rows of a Parquet file have the fields of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str) and has_surrogate(value):
        raise _Refused(UNPAIRED_SURROGATE)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    for inner in value if isinstance(value, list) else ():
        _refuse_surrogates(inner)


def chat_columns(path: InputFile, schema: Any) -> list[str]:
    """Return the columns of a Parquet file to read. Raises InputError if none holds messages."""
    names = schema.names
    if not ({"messages", "conversations"} & set(names) or {"prompt", "completion"} <= set(names)):
        raise InputError(f"{path} has {NO_MESSAGES_FIELD} among its columns ({', '.join(names)}); rename one")
    return [name for name in (*FIELDS, "id", "source") if name in names]
