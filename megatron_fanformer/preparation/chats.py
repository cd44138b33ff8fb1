"""Conversations: JSON objects with messages, in the forms that data sets of chats have.

    messages        a list of objects with `role` and `content`
    conversations   a list of objects with `from` (human, gpt, system) and `value`
    prompt          with `completion`: two texts, or two lists of messages

As with documents, a line (in a Parquet file, a row) is either a conversation or refused with a reason.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_fanformer.data.chat_template import ASSISTANT, Message
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.documents import (
    INVALID_UTF8,
    LOOK_AGAIN_BYTES,
    TOO_LONG_A_LINE,
    UNPAIRED_SURROGATE,
    Refusal,
    Scalar,
    as_text,
    decoded_again,
    has_surrogate,
)
from megatron_fanformer.preparation.remote_inputs import InputFile

NO_MESSAGES_FIELD = "no messages, conversations, or prompt and completion"
NOT_MESSAGES = "messages are not a list of objects with a role and a content"
CONTENT_NOT_A_STRING = "content is not a string"
NO_MESSAGE = "no message"
UNKNOWN_ROLE = "unknown role"
TOOL_CALLS = "tool calls"
NO_ASSISTANT_TURN = "no assistant turn"

ROLES = {
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
    "human": "user",
    "gpt": ASSISTANT,
}
"""The templates' names for the roles of a data set."""
FIELDS = ("messages", "conversations", "prompt", "completion")


class Chat(NamedTuple):
    """The fields of a conversation that are kept."""

    messages: list[Message]
    id: str | None
    source: str | None


class _Line(msgspec.Struct):
    """The fields that are read of a line; nothing else of it is built."""

    messages: Any = None
    conversations: Any = None
    prompt: Any = None
    completion: Any = None
    id: Scalar = None
    source: Scalar = None


class ChatParser:
    """Extracts the messages, id and source from one line or row."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode

    def parse(self, line: bytes) -> Chat | Refusal:
        """Return the conversation on `line` (without or with its line end), or why there is none."""
        if len(line) > LOOK_AGAIN_BYTES:  # its objects take up to 25 times the memory
            return Refusal(TOO_LONG_A_LINE)
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
            return self.judge({name: column[row].as_py() for name, column in columns.items()})
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
        return Chat(messages, as_text(fields.get("id")), as_text(fields.get("source")))


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
    said, content = (
        stated.get(name) if stated.get(name) is not None else stated.get(other)
        for name, other in (("role", "from"), ("content", "value"))
    )
    if not isinstance(said, str):
        return Refusal(NOT_MESSAGES)
    role = ROLES.get(said)
    if role is None:
        return Refusal(UNKNOWN_ROLE)
    if stated.get("tool_calls"):  # a template would write them out, or leave them out: here they would be lost
        return Refusal(TOOL_CALLS)
    if not isinstance(content, str):
        return Refusal(CONTENT_NOT_A_STRING)
    return Refusal(UNPAIRED_SURROGATE) if has_surrogate(content) else {"role": role, "content": content}


def chat_columns(path: InputFile, schema: Any) -> list[str]:
    """Return the columns of a Parquet file to read. Raises InputError if none holds messages."""
    names = schema.names
    if not ({"messages", "conversations"} & set(names) or {"prompt", "completion"} <= set(names)):
        raise InputError(f"{path} has {NO_MESSAGES_FIELD} among its columns ({', '.join(names)}); rename one")
    return [name for name in (*FIELDS, "id", "source") if name in names]
