"""Conversations: parsed from lines or rows, rendered by a chat template, and encoded with a mask of learned tokens.

They come in the forms that data sets of chats have:

    messages        a list of objects with `role` and `content`; beside it, `tools` that may be called
    conversations   a list of objects with `from` (human, gpt, system) and `value`
    prompt          with `completion`: two texts, or two lists of messages
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_fanformer.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    RenderedChat,
    TemplateRefusal,
    chat_pieces,
    function_of,
)
from megatron_fanformer.data.manifest import Settings
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.documents import (
    INVALID_UTF8,
    LOOK_AGAIN_BYTES,
    UNPAIRED_SURROGATE,
    Block,
    Refusal,
    Scalar,
    as_text,
    decoded_again,
    has_surrogate,
    parse_block,
)
from megatron_fanformer.prepare.encoding import EncodedBlock, EncoderChoice, encoded_block
from megatron_fanformer.prepare.inputs import InputFile

TOO_LONG_A_CHAT = f"above {LOOK_AGAIN_BYTES >> 20} MiB"
NO_MESSAGES_FIELD = "no messages, conversations, or prompt and completion"
NOT_MESSAGES = "messages are not a list of objects with a role and a content"
CONTENT_NOT_TEXT = "content is not a text, or parts of text"
UNKNOWN_ROLE = "unknown role"
TOOL_CALLS = "tool calls are not a list of functions with a name, of the assistant"
TOOLS = "tools are not a list of functions with a name"
NO_ASSISTANT_TURN = "no assistant turn"
NOT_A_WEIGHT = "weight, train or loss of an answer is neither 0 nor 1"

# Reasons to leave out a conversation that was parsed.
TOO_MANY_TOKENS = "longer than max_tokens"
NOTHING_LEARNED = "nothing to learn"
MARKS_OTHERS = "the template does not mark each answer, and some have weights"
NOTHING_LEARNED_BEFORE_CUT = "nothing to learn within max_tokens"

ROLES = {
    **{role: role for role in ("system", "developer", "user", ASSISTANT, "tool")},
    "human": "user",
    "gpt": ASSISTANT,
}
"""The templates' names for the roles of a data set."""
FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
WEIGHTS = ("weight", "train", "loss")
"""Fields of an answer that is not learned where one of them is 0 or false."""


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
    """Extract messages, id and source from one line or row."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode

    def parse(self, line: bytes) -> Chat | Refusal:
        """Return the conversation on `line` (without or with its line end), or the reason that there is none."""
        if len(line) > LOOK_AGAIN_BYTES:  # its objects take up to 25 times the memory
            return Refusal(TOO_LONG_A_CHAT)
        fields: Mapping[str, Any] | Refusal
        try:
            fields = msgspec.structs.asdict(self._decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = decoded_again(line)
        return fields if isinstance(fields, Refusal) else self.judge(fields)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Chat | Refusal]:
        """Return the conversation, or the refusal, of each row of a Parquet file; `columns` are pyarrow arrays."""
        return [self._parse_row(columns, row) for row in range(len(next(iter(columns.values()))))]

    def _parse_row(self, columns: Mapping[str, Any], row: int) -> Chat | Refusal:
        try:
            return self.judge({name: _without_nulls(column[row].as_py()) for name, column in columns.items()})
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)

    def columns(self, path: InputFile, schema: Any) -> list[str]:
        """Return the columns of a Parquet file to read.

        Raises:
            InputError: none holds messages.
        """
        names = schema.names
        if not ({"messages", "conversations"} & set(names) or {"prompt", "completion"} <= set(names)):
            raise InputError(f"{path} has {NO_MESSAGES_FIELD} among its columns ({', '.join(names)}); rename one")
        return [name for name in (*FIELDS, "id", "source") if name in names]

    def judge(self, fields: Mapping[str, Any]) -> Chat | Refusal:
        """Return the conversation of these fields, or the reason that it is refused."""
        try:
            messages = list(map(_message, _stated_messages(fields)))
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
    text = None if content is None and calls else _text(content)
    if role == ASSISTANT and any(stated.get(name) not in (None, 0, 1) for name in WEIGHTS):
        raise _Refused(NOT_A_WEIGHT)
    others = {name: value for name, value in stated.items() if name not in ("from", "value") and value is not None}
    message = {**others, "role": role, "content": text}
    _refuse_surrogates(message)
    return message


def _text(content: Any) -> str:
    """Return the content of a message as one text; it may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise _Refused(CONTENT_NOT_TEXT)
    return "".join(texts)


def _tools(stated: Any) -> list[dict[str, Any]] | None:
    """Return the functions that may be called, from a list or its JSON text, which data sets in columns have."""
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
    """Return a value without its null fields: each row of a Parquet file has the fields of all rows."""
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


class ChatEncoder:
    """Parse, render and tokenize blocks of conversations, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        assert settings.chat is not None
        self.parser = ChatParser()
        self._template = ChatTemplate(settings.chat.template, settings.chat.template_variables)
        self._encoder = choice.make()
        self._settings = settings.chat
        self._dtype = np.dtype(settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the conversations of `block`, the file's `number`-th, in order."""
        outcomes = parse_block(block, self.parser)
        rendered: dict[int, RenderedChat] = {}  # by line
        for line, chat in enumerate(outcomes):
            if isinstance(chat, Refusal):
                continue
            try:
                rendered[line] = self._rendered(chat)
            except TemplateRefusal as refusal:
                outcomes[line] = Refusal(refusal.reason)
        name = f"conversation {outcomes[next(iter(rendered))].id!r}" if rendered else ""
        chats = {line: list(chat_pieces(self._encoder.exact, text)) for line, text in rendered.items()}
        texts = [piece.encode() for pieces in chats.values() for piece, _ in pieces if isinstance(piece, str)]
        encoded = iter(self._encoder.encode_block(number, texts, name))
        ids, masks, is_cut, text_bytes = [np.empty(0, self._dtype)], [np.empty(0, np.uint8)], [], 0
        for line, pieces in chats.items():
            parts = [next(encoded) if isinstance(piece, str) else np.array([piece]) for piece, _ in pieces]
            flags = [np.full(len(part), flag, np.uint8) for part, (_, flag) in zip(parts, pieces, strict=True)]
            chat = self._cut_or_pad(np.concatenate([ids[0], *parts]), np.concatenate([masks[0], *flags]))
            if isinstance(chat, Refusal):
                outcomes[line] = chat
                continue
            ids.append(chat[0].astype(self._dtype))
            masks.append(chat[1])
            is_cut.append(chat[2])
            text_bytes += len(rendered[line].text.encode())
        return encoded_block(
            outcomes,
            tokens=np.concatenate(ids),
            lengths=np.array(list(map(len, ids[1:])), np.int32),
            text_bytes=text_bytes,
            mask=np.concatenate(masks),
            learned=[int(mask.sum()) for mask in masks[1:]],
            is_cut=is_cut,
        )

    def _rendered(self, chat: Chat) -> RenderedChat:
        rendered = self._template.render(chat.messages, tools=chat.tools)
        answers = [message for message in chat.messages if message["role"] == ASSISTANT]
        weights = [all(answer.get(name) != 0 for name in WEIGHTS) for answer in answers]
        if all(weights):
            weights = [True] * len(rendered.learned)
        elif len(weights) != len(rendered.learned):
            raise TemplateRefusal("answers have weights, and the template does not mark each of them", MARKS_OTHERS)
        spans = list(zip(rendered.learned, weights, strict=True))
        kept = spans if self._settings.learn == "all" else spans[-1:]
        return rendered._replace(learned=[span for span, weight in kept if weight])

    def _cut_or_pad(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | Refusal:
        """Cut or pad a conversation; return its ids, its mask and whether it was cut, or return the refusal."""
        settings = self._settings
        is_cut = settings.max_tokens is not None and len(ids) > settings.max_tokens
        if is_cut and settings.too_long == "drop":
            return Refusal(TOO_MANY_TOKENS)
        ids, mask = ids[: settings.max_tokens], mask[: settings.max_tokens]
        if not mask.any():
            return Refusal(NOTHING_LEARNED_BEFORE_CUT if is_cut else NOTHING_LEARNED)
        if settings.pad_id is not None and settings.max_tokens is not None:
            padding = settings.max_tokens - len(ids)
            ids = np.pad(ids, (0, padding), constant_values=settings.pad_id)
            mask = np.pad(mask, (0, padding))
        return ids, mask, is_cut
