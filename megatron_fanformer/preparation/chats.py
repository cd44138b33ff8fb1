"""Conversations: JSON objects with messages, in the forms that data sets of chats have.

    messages        a list of objects with `role` and `content`; beside it, `tools` that may be called
    conversations   a list of objects with `from` (human, gpt, system) and `value`
    prompt          with `completion`: two texts, or two lists of messages

As with documents, a line (in a Parquet file, a row) is either a conversation or refused with a reason.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_fanformer.data.chat_template import ASSISTANT, Message
from megatron_fanformer.data.chat_tools import function_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.documents import (
    INVALID_UTF8,
    LOOK_AGAIN_BYTES,
    UNPAIRED_SURROGATE,
    Refusal,
    Scalar,
    as_text,
    decoded_again,
    has_surrogate,
)
from megatron_fanformer.preparation.inputs import InputFile

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
        try:
            return self.judge(msgspec.structs.asdict(self._decode(line)))
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
        stated = _stated_messages(fields)
        if isinstance(stated, Refusal):
            return stated
        messages: list[Message] = []
        for one in stated:
            message = _message(one)
            if isinstance(message, Refusal):
                return message
            messages.append(message)
        if not messages:
            return Refusal(NO_MESSAGE)
        if all(message["role"] != ASSISTANT for message in messages):
            return Refusal(NO_ASSISTANT_TURN)
        tools = _tools(fields.get("tools"))
        if isinstance(tools, Refusal):
            return tools
        return Chat(messages, as_text(fields.get("id")), as_text(fields.get("source")), tools)


def _stated_messages(fields: Mapping[str, Any]) -> Sequence[Any] | Refusal:
    for name in ("messages", "conversations"):
        stated = fields.get(name)
        if stated is not None:
            return stated if isinstance(stated, list) else Refusal(NOT_MESSAGES)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if prompt is None or completion is None:
        return Refusal(NO_MESSAGES_FIELD)
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]


def _message(stated: Any) -> Message | Refusal:
    if not isinstance(stated, dict):
        return Refusal(NOT_MESSAGES)
    speaker, content = (
        stated.get(name) if stated.get(name) is not None else stated.get(other)
        for name, other in (("role", "from"), ("content", "value"))
    )
    if not isinstance(speaker, str):
        return Refusal(NOT_MESSAGES)
    role = ROLES.get(speaker)
    if role is None:
        return Refusal(UNKNOWN_ROLE)
    calls = stated.get("tool_calls")
    if calls and (role != ASSISTANT or not isinstance(calls, list) or None in map(function_of, calls)):
        return Refusal(TOOL_CALLS)
    if content is None and not calls:
        return Refusal(NO_CONTENT)
    text = None if content is None else _text(content)
    if isinstance(text, Refusal):
        return text
    if role == ASSISTANT and any(stated.get(name) not in (None, 0, 1) for name in WEIGHTS):
        return Refusal(NOT_A_WEIGHT)
    others = {name: value for name, value in stated.items() if name not in ("from", "value") and value is not None}
    message = {**others, "role": role, "content": text}
    return Refusal(UNPAIRED_SURROGATE) if _has_surrogate(message) else message


def is_learned(answer: Message) -> bool:
    """Return whether an assistant's message is to be learned, by its `WEIGHTS`."""
    return all(answer.get(name) != 0 for name in WEIGHTS)


def _text(content: Any) -> str | Refusal:
    """Return a content that is a text, or parts of text, one behind the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        return Refusal(CONTENT_NOT_A_STRING)
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    kinds = [part.get("type", "text") for part in content if isinstance(part, dict)]
    if any(kind != "text" for kind in kinds) or not all(isinstance(part, str) for part in parts):
        return Refusal(PART_NOT_TEXT)
    return "".join(part for part in parts if isinstance(part, str))


def _tools(stated: Any) -> list[dict[str, Any]] | Refusal | None:
    """Return the functions that may be called: a list, or its JSON text, as data sets in columns have it."""
    if isinstance(stated, str) and stated.strip():
        try:
            stated = msgspec.json.decode(stated)
        except (msgspec.MsgspecError, RecursionError):
            return Refusal(TOOLS)
    if stated is None or stated == "":
        return None
    if not isinstance(stated, list) or None in map(function_of, stated):
        return Refusal(TOOLS)
    return Refusal(UNPAIRED_SURROGATE) if _has_surrogate(stated) else stated


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: rows of a Parquet file have the fields of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return has_surrogate(value)
    if isinstance(value, dict):
        return any(_has_surrogate(name) or _has_surrogate(each) for name, each in value.items())
    return isinstance(value, list) and any(map(_has_surrogate, value))


def chat_columns(path: InputFile, schema: Any) -> list[str]:
    """Return the columns of a Parquet file to read. Raises InputError if none holds messages."""
    names = schema.names
    if not ({"messages", "conversations"} & set(names) or {"prompt", "completion"} <= set(names)):
        raise InputError(f"{path} has {NO_MESSAGES_FIELD} among its columns ({', '.join(names)}); rename one")
    return [name for name in (*FIELDS, "id", "source") if name in names]
