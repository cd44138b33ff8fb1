"""Chat templates: from the messages of a conversation to a text, of which spans are learned, and to token ids.

Templates are Jinja, as tokenizers on Hugging Face carry them; OLMo's form, in which the paper's data are prepared, is
built in as one. transformers renders them, in Jinja's sandbox. What is learned is each assistant turn: its content and
its end of turn. A template says so by `{% generation %}` blocks; without them, a turn is the text that it adds to
the rendering of the messages before it.

The text is cut at the edges of these spans before it is encoded: no token is partly learned, and a prompt, which ends
where an answer begins, has the ids that it has in training.
"""

import copy
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.data.tokenizer import (
    CHAT_TEMPLATE_JINJA,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    Tokenizer,
    load_tokenizer,
    read_beside,
    token_text,
)
from megatron_fanformer.errors import InputError

OLMO = "olmo"
ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")

# The form of OLMo's script that prepares Tulu's conversations (allenai/OLMo, scripts/prepare_tulu_data.py).
OLMO_TEMPLATE = """\
{{ eos_token -}}
{% for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' -}}
{% if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration -%}
{{ '\\n' -}}
{% else -%}
{{ message['content'] | trim + '\\n' -}}
{% endif -%}
{% endfor -%}
{% if add_generation_prompt -%}
{{ '<|assistant|>\\n' -}}
{% endif -%}
"""

Message = Mapping[str, Any]
"""One message: its `role`, its `content`, a text, or None beside `tool_calls`, and whatever else a template reads."""
Tools = Sequence[Mapping[str, Any]]
"""Functions that may be called: `function.name` and what else a template writes."""
QUESTION, ANSWER = {"role": "user", "content": "A question?"}, {"role": ASSISTANT, "content": "An answer!"}
"""Rendered to see the text that a template writes around messages."""


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    learned: list[tuple[int, int]]
    """Spans [begin, end) of its characters, in order: one for each assistant turn."""


class TemplateRefusal(InputError):
    """A template cannot render a conversation, or leaves unknown which of its tokens are learned.

    `reason` has the same words for all conversations that fail in this way.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


REFUSED = "refused by the template"
BEGINS_OTHERWISE = "the template renders its beginning otherwise"

_one_at_a_time = threading.Lock()  # transformers keeps the marks of a rendering in the template


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may use."""

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that the tokenizer has, of bos_token, eos_token, pad_token and unk_token."""

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        *,
        needs_learned: bool = True,
    ) -> RenderedChat:
        """Return the text of a conversation, with the opening of the next answer where `add_generation_prompt`.

        Arguments of tool calls are given as stated; those that are JSON text as objects where the template cannot
        render the text, or would escape it.

        Raises TemplateRefusal if it cannot render this one, or where `needs_learned`, as in training, and the learned
        span of a turn is unknown; else such turns have no span.
        """
        others, escaped = _with_objects(messages)
        try:
            chat = self._with_learned(messages, add_generation_prompt, tools, needs_learned)
            if not any(text in chat.text for text in escaped):
                return chat
        except TemplateRefusal:
            if not escaped:
                raise
        return self._with_learned(others, add_generation_prompt, tools, needs_learned)

    def with_variables(self) -> str:
        """Return its source with the special tokens set: the same text, whichever tokens another program gives it."""
        return _with_set(self.source, self.variables)

    def end_of_turn(self) -> str:
        """Return the learned text behind the content of an answer; nothing where that is unknown."""
        try:
            text, spans = self.render([QUESTION, ANSWER])
        except TemplateRefusal:
            return ""
        return "".join(text[begin:end] for begin, end in spans).rpartition(ANSWER["content"])[2]

    def _with_learned(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools | None, needs_learned: bool
    ) -> RenderedChat:
        chat = self._rendered(messages, add_generation_prompt, tools)
        if GENERATION.search(self.source):
            return chat
        turns = [turn for turn, message in enumerate(messages) if message["role"] == ASSISTANT]
        spans = {turn: self._span(messages, turn, chat.text, tools) for turn in turns}
        if needs_learned and None in spans.values():
            turn = next(turn for turn, span in spans.items() if span is None)
            raise TemplateRefusal(
                f"the chat template renders the messages before message {turn} (from 0) otherwise once others follow, "
                "so that what is learned is unknown; mark it in the template by {% generation %} blocks",
                BEGINS_OTHERWISE,
            )
        return RenderedChat(chat.text, [span for span in spans.values() if span is not None])

    def _span(self, messages: Sequence[Message], turn: int, whole: str, tools: Tools | None) -> tuple[int, int] | None:
        """Return the span of an assistant turn: its text beyond the messages before it and the opening of an answer.

        White space behind the mark that ends the turn is left out of it. None where the span is unknown.
        """
        content = (messages[turn].get("content") or "").strip()
        try:
            text = self._rendered(messages[: turn + 1], False, tools).text
            if any(message["role"] != "system" for message in messages[:turn]):
                before = self._rendered(messages[:turn], True, tools).text
            else:  # few templates render no messages, or the system's alone: the opening is that of the next answer
                opening = self._rendered(messages[: turn + 1], True, tools).text.removeprefix(text).lstrip()
                if text.count(opening or content) != 1:
                    return None
                before = text.partition(opening or content)[0] + opening
        except TemplateRefusal:
            return None
        if not whole.startswith(text) or not text.startswith(before):
            return None
        span = text[len(before) :]
        place = span.find(content)
        has_mark = bool(span[place + len(content) :].strip()) if place >= 0 else not content.endswith(span.strip())
        return len(before), len(text.rstrip() if has_mark else text)

    def _rendered(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> RenderedChat:
        """Render as transformers' `apply_chat_template` does, without fields that are None; with the marked spans."""
        from transformers.utils.chat_template_utils import render_jinja_template

        stated = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            with _one_at_a_time:
                (text,), spans = render_jinja_template(
                    [stated],
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=GENERATION.search(self.source) is not None,
                    **self.variables,
                )
            text.encode()  # no text can hold the unpaired surrogate that a template may write
        except Exception as error:  # a template may fail in any way
            reason = (" ".join(str(error).split()) or type(error).__name__)[:1000]
            raise TemplateRefusal(
                f"the chat template cannot render the conversation ({reason}); change it, or use another template",
                REFUSED,
            ) from error
        learned = sorted(*spans) if spans else []
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(learned)):
            raise TemplateRefusal(
                "the chat template has {% generation %} blocks in each other, or in a macro; mark each turn once, "
                "outside of macros",
                REFUSED,
            )
        return RenderedChat(text, learned)


def _with_set(source: str, variables: Mapping[str, str]) -> str:
    # Characters as they are: Jinja reads JSON's pair of surrogates as two characters, which no text can hold.
    texts = {name: json.dumps(text, ensure_ascii=False) for name, text in variables.items()}
    # the line end that follows is no text: blocks are trimmed
    return "".join(f"{{% set {name} = {text} %}}\n" for name, text in texts.items()) + source


# -- tools


def function_of(stated: Any) -> Mapping[str, Any] | None:
    """Return the function of a tool or a call, `{"function": {…}}` or itself; None where it has no name."""
    function = stated.get("function", stated) if isinstance(stated, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
    return function if is_named else None


def _with_objects(messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
    """Return messages whose calls have objects for arguments that are JSON text, and that text as a JSON string."""
    if not any(message.get("tool_calls") for message in messages):
        return messages, []
    others, escaped = copy.deepcopy([dict(message) for message in messages]), []
    for function in (function_of(call) for message in others for call in message.get("tool_calls") or ()):
        try:
            text: str = function["arguments"]  # type: ignore[index]  # a call without a function is left as it is
            arguments = json.loads(text)
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            escaped += [json.dumps(text, ensure_ascii=ascii_only) for ascii_only in (True, False)]
            function["arguments"] = arguments  # type: ignore[index]
    return others, escaped


# -- the template of a tokenizer


def find_template(
    tokenizer_path: str | Path, named: str | Path | None = None, *, eod_id: int | None = None
) -> ChatTemplate:
    """Return the template of a tokenizer: a Jinja file or `olmo` where named, else the one beside the tokenizer.

    That is `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`, in the tokenizer's folder. Special
    tokens are those of `tokenizer_config.json`; where it states no `eos_token`, and wherever `eod_id` is given, the end
    of text is the tokenizer's own piece.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    path = Path(tokenizer_path)
    if named is None:
        source = own_template(_folder_of(path))
        if source is None:
            raise InputError(
                f"tokenizer {path} has no chat template ({CHAT_TEMPLATE_JINJA}, or one in {TOKENIZER_CONFIG}); name a"
                f" Jinja file as --chat-template, or {OLMO} for the paper's form"
            )
    else:
        source = OLMO_TEMPLATE if str(named) == OLMO else _read(Path(named))
    try:
        render_jinja_template([], chat_template=source)
    except (TemplateSyntaxError, RecursionError) as error:
        where = f"line {error.lineno}: {error.message}" if isinstance(error, TemplateSyntaxError) else str(error)
        raise InputError(f"the chat template is not valid Jinja, {where}; fix it") from error
    return ChatTemplate(source, _special_tokens(path, eod_id))


def template_of(folder: Path, tokenizer: Path) -> str | None:
    """Return the template in a folder, with those special tokens set that it names, and does not set itself."""
    source = own_template(folder)
    if source is None:
        return None
    tokens = _special_tokens(tokenizer).items()
    return _with_set(source, {name: text for name, text in tokens if name in source and f"set {name} =" not in source})


def _folder_of(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _special_tokens(tokenizer_path: Path, eod_id: int | None = None) -> dict[str, str]:
    """Return a tokenizer's special tokens by their names in templates, as `find_template` says."""
    config = read_beside(_folder_of(tokenizer_path) / TOKENIZER_CONFIG)
    variables = {name: text for name in VARIABLES if (text := token_text(config.get(name))) is not None}
    if eod_id is not None or "eos_token" not in variables:
        tokenizer = load_tokenizer(tokenizer_path, eod_id=eod_id, needs_eod=False)
        if tokenizer.eod_id >= 0:
            variables["eos_token"] = tokenizer.piece(tokenizer.eod_id)
    return variables


def attached_files(tokenizer: Path | None, chat_template: str | None, *, eod_id: int | None = None) -> dict[str, bytes]:
    """Return the small files that go into a checkpoint, by their names there.

    An end of text that is stated, by `eod_id` or beside the tokenizer, is stated there too.
    """
    files = {} if chat_template is None else {CHAT_TEMPLATE_JINJA: chat_template.encode()}
    if tokenizer is not None:
        files[f"tokenizer{tokenizer.suffix}"] = tokenizer.read_bytes()
        read = load_tokenizer(tokenizer, eod_id=eod_id, needs_eod=False)
        if read.eod_source is not None:
            files[GENERATION_CONFIG] = f'{{"eos_token_id": {read.eod_id}}}\n'.encode()
    return files


def own_template(folder: Path) -> str | None:
    """Return the template in a tokenizer's folder, in Jinja, as `find_template` finds it; None where there is none."""
    if (folder / CHAT_TEMPLATE_JINJA).is_file():
        return _read(folder / CHAT_TEMPLATE_JINJA)
    stated = read_beside(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(stated, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat template: {file} cannot be read ({error}); name a Jinja file") from error


# -- token ids


def chat_pieces(tokenizer: Tokenizer, chat: RenderedChat) -> Iterator[tuple[str | int, bool]]:
    """Yield the pieces of a conversation, cut where learned spans begin and end: texts or ids, and whether learned."""
    bounds = [0, *itertools.chain.from_iterable(chat.learned), len(chat.text)]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        yield from ((piece, number % 2 == 1) for piece in tokenizer.cut_at_special(chat.text[begin:end]))


def encode_chat(tokenizer: Tokenizer, chat: RenderedChat) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a rendered conversation, [t] int64, and which of them are learned, [t] bool."""
    ids: list[int] = []
    learned: list[bool] = []
    for piece, is_learned in chat_pieces(tokenizer, chat):
        new = [piece] if isinstance(piece, int) else tokenizer.encode(piece)
        ids += new
        learned += [is_learned] * len(new)
    return np.array(ids, np.int64), np.array(learned, bool)


def refuse_spaces_between(tokenizer: Tokenizer) -> None:
    """Raise InputError for a tokenizer that puts a space before every text: a conversation cannot be cut then."""
    if tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode("b")]) != "ab":
        raise InputError(
            f"tokenizer {tokenizer.path} puts a space before every text, so that conversations, which are encoded in"
            " parts, would get spaces that they do not have; use one without (add_dummy_prefix or add_prefix_space off)"
        )
