"""Conversations: parsed from lines or rows, rendered by a chat template, and encoded with a mask of learned tokens.

Data sets of conversations have one of these forms:

    messages        a list of objects with `role` and `content`, and perhaps a field `tools`: functions to call
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
    decode_irregular,
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

ROLES = {role: role for role in ("system", "developer", "user", ASSISTANT, "tool")}
ROLES |= {"human": "user", "gpt": ASSISTANT}
"""The roles that templates know, by the names that data sets give them."""
FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
WEIGHTS = ("weight", "train", "loss")
"""Fields of an answer; if one of them is 0 or false, the answer is not learned."""


class Chat(NamedTuple):
    """A conversation as it was parsed."""

    messages: list[Message]
    id: str | None
    source: str | None
    tools: list[dict[str, Any]] | None = None


class ChatParser:
    """Extracts messages, tools, id and source from one line or row of a data set."""

    def __init__(self) -> None:
        fields: list[Any] = [*((name, Any, None) for name in FIELDS), ("id", Scalar, None), ("source", Scalar, None)]
        self._decode = msgspec.json.Decoder(msgspec.defstruct("Line", fields)).decode  # skips other fields

    def parse(self, line: bytes) -> Chat | Refusal:
        """Return the conversation on a line, or the reason to refuse the line; a line end does not matter."""
        if len(line) > LOOK_AGAIN_BYTES:  # parsed, a line takes up to 25 times its bytes
            return Refusal(TOO_LONG_A_CHAT)
        fields: Mapping[str, Any] | Refusal
        try:
            fields = msgspec.structs.asdict(self._decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = decode_irregular(line)
        return fields if isinstance(fields, Refusal) else self.make_chat(fields)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Chat | Refusal]:
        """Return the conversation in each row of a Parquet file, or the refusal; `columns` are pyarrow arrays."""
        outcomes: list[Chat | Refusal] = []
        for row in zip(*columns.values(), strict=True):
            try:
                values = [_without_nulls(scalar.as_py()) for scalar in row]
                outcomes.append(self.make_chat(dict(zip(columns, values, strict=True))))
            except UnicodeDecodeError:
                outcomes.append(Refusal(INVALID_UTF8))
        return outcomes

    def columns(self, path: InputFile, schema: Any) -> list[str]:
        """Return the names of the columns to read from a Parquet file. Raises InputError if none holds messages."""
        names = schema.names
        if not ({"messages", "conversations"} & set(names) or {"prompt", "completion"} <= set(names)):
            raise InputError(f"{path} has {NO_MESSAGES_FIELD} among its columns ({', '.join(names)}); rename one")
        return [name for name in (*FIELDS, "id", "source") if name in names]

    def make_chat(self, fields: Mapping[str, Any]) -> Chat | Refusal:
        """Return the conversation that these fields state, or the reason to refuse it."""
        try:
            messages = list(map(_parse_message, _find_messages(fields)))
            if all(message["role"] != ASSISTANT for message in messages):
                raise _Refused(NO_ASSISTANT_TURN)
            return Chat(
                messages, as_text(fields.get("id")), as_text(fields.get("source")), _parse_tools(fields.get("tools"))
            )
        except _Refused as refused:
            return Refusal(str(refused))


class _Refused(Exception):
    """Raised while a conversation is parsed; the message is the reason to refuse it."""


def _find_messages(fields: Mapping[str, Any]) -> Sequence[Any]:
    """Return the messages of a conversation as the data set states them. Raises _Refused if there are none."""
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


def _parse_message(stated: Any) -> Message:
    """Return a message with the field names and the role that templates expect. Raises _Refused if it is invalid."""
    if not isinstance(stated, dict):
        raise _Refused(NOT_MESSAGES)
    fields = {name: value for name, value in stated.items() if value is not None}
    speaker = fields.get("role", fields.pop("from", None))  # pop: `from` and `value` are not kept
    content = fields.get("content", fields.pop("value", None))
    if not isinstance(speaker, str):
        raise _Refused(NOT_MESSAGES)
    if speaker not in ROLES:
        raise _Refused(UNKNOWN_ROLE)
    role, calls = ROLES[speaker], fields.get("tool_calls")
    if calls and (role != ASSISTANT or not isinstance(calls, list) or None in map(function_of, calls)):
        raise _Refused(TOOL_CALLS)
    text = None if content is None and calls else _join_text(content)  # an answer may consist of calls alone
    if role == ASSISTANT and any(fields.get(name) not in (None, 0, 1) for name in WEIGHTS):
        raise _Refused(NOT_A_WEIGHT)
    message = {**fields, "role": role, "content": text}
    _refuse_surrogates(message)
    return message


def _join_text(content: Any) -> str:
    """Return a message's content, which is a text, or a list of texts and of objects with a text, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Refused(CONTENT_NOT_TEXT)
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part for part in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise _Refused(CONTENT_NOT_TEXT)
    return "".join(texts)


def _parse_tools(stated: Any) -> list[dict[str, Any]] | None:
    """Return the functions that may be called; a Parquet file may state the list of them as JSON text."""
    if isinstance(stated, str) and stated:
        try:
            stated = msgspec.json.decode(stated)
        except (msgspec.MsgspecError, RecursionError):
            raise _Refused(TOOLS) from None
    if stated is None or stated == "":  # each is a way to state no tools
        return None
    if not isinstance(stated, list) or None in map(function_of, stated):
        raise _Refused(TOOLS)
    _refuse_surrogates(stated)
    return stated


def _without_nulls(value: Any) -> Any:
    """Return a value from a Parquet file without null fields: they are fields that only other objects have."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _refuse_surrogates(value: Any) -> None:
    """Raise _Refused if a text anywhere in a value contains an unpaired surrogate."""
    if isinstance(value, str) and has_surrogate(value):
        raise _Refused(UNPAIRED_SURROGATE)
    if isinstance(value, dict):
        value = [*value, *value.values()]  # the names of the fields, and their values
    for inner in value if isinstance(value, list) else ():
        _refuse_surrogates(inner)


class ChatEncoder:
    """Parses, renders and tokenizes blocks of conversations, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        assert settings.chat is not None
        self.parser = ChatParser()
        self._template = ChatTemplate(settings.chat.template, settings.chat.template_variables)
        self._encoder = choice.make_encoder()
        self._settings, self._dtype = settings.chat, np.dtype(settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the conversations of a file's block; blocks are numbered from 0."""
        outcomes = parse_block(block, self.parser)  # a refusal replaces each conversation that is refused below
        rendered: dict[int, RenderedChat] = {}  # by the number of the line
        for line, chat in enumerate(outcomes):
            if isinstance(chat, Refusal):
                continue
            try:
                rendered[line] = self._render(chat)
            except TemplateRefusal as refusal:
                outcomes[line] = Refusal(refusal.reason)
        first_name = f"conversation {outcomes[next(iter(rendered))].id!r}" if rendered else ""
        # A piece is a text, or the id of a special token. The texts of all conversations are encoded together.
        pieces_by_line = {line: list(chat_pieces(self._encoder.exact, chat)) for line, chat in rendered.items()}
        texts = [piece for pieces in pieces_by_line.values() for piece, _ in pieces if isinstance(piece, str)]
        ids_of_texts = iter(self._encoder.encode_block(number, texts, first_name))
        no_ids, no_mask = np.empty(0, self._dtype), np.empty(0, np.uint8)  # concatenate needs an array with a type
        tokens, masks, is_cut, text_bytes = [], [], [], 0
        for line, pieces in pieces_by_line.items():
            ids_of_pieces: list[np.ndarray] = [no_ids]
            mask_of_pieces: list[np.ndarray] = [no_mask]
            for piece, is_learned in pieces:
                ids_of_pieces.append(next(ids_of_texts) if isinstance(piece, str) else np.array([piece]))
                mask_of_pieces.append(np.full(len(ids_of_pieces[-1]), is_learned, np.uint8))
            fitted = self._cut_or_pad(np.concatenate(ids_of_pieces), np.concatenate(mask_of_pieces))
            if isinstance(fitted, Refusal):
                outcomes[line] = fitted
                continue
            ids, mask, was_cut = fitted
            tokens.append(ids.astype(self._dtype))
            masks.append(mask)
            is_cut.append(was_cut)
            text_bytes += len(rendered[line].text.encode())
        return encoded_block(
            outcomes,
            tokens=np.concatenate([no_ids, *tokens]),
            lengths=np.array(list(map(len, tokens)), np.int32),
            text_bytes=text_bytes,
            mask=np.concatenate([no_mask, *masks]),
            learned=[int(mask.sum()) for mask in masks],
            is_cut=is_cut,
        )

    def _render(self, chat: Chat) -> RenderedChat:
        """Render a conversation, and keep the spans of only those answers that are to be learned.

        Raises TemplateRefusal if the template refuses the messages, or if an answer has weight 0 and the template does
        not mark the span of each answer.
        """
        rendered = self._template.render(chat.messages, tools=chat.tools)
        answers = [message for message in chat.messages if message["role"] == ASSISTANT]
        are_learned = [all(answer.get(name) != 0 for name in WEIGHTS) for answer in answers]
        if all(are_learned):  # then every span is, even if the template does not mark one for each answer
            are_learned = [True] * len(rendered.learned)
        elif len(are_learned) != len(rendered.learned):
            raise TemplateRefusal("answers have weights, and the template does not mark each of them", MARKS_OTHERS)
        spans = list(zip(rendered.learned, are_learned, strict=True))
        chosen_spans = spans if self._settings.learn == "all" else spans[-1:]
        return rendered._replace(learned=[span for span, is_learned in chosen_spans if is_learned])

    def _cut_or_pad(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | Refusal:
        """Cut or pad a conversation. Return the ids, the mask, and whether ids were cut off; or return a refusal."""
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
