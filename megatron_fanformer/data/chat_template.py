"""Chat templates: they turn the messages of a conversation into a text with learned spans, and into token ids.

Templates are in Jinja, like those beside tokenizers on Hugging Face; transformers renders them in Jinja's sandbox. The
form of the paper's data, OLMo's, is built in. The model learns every assistant turn: its content and its end of turn.
A template marks the turns by `{% generation %}` blocks. Without marks, the span of a turn is the text that the turn
adds to the rendering of the messages before it.

The text is cut where spans begin and end before it is encoded. So no token is partly learned, and a prompt, which ends
where an answer begins, has the same ids as in training.
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
    read_json_config,
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
"""One message: `role`, `content` (a text, or None beside `tool_calls`), and other fields that a template may read."""
Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call: `function.name`, and other fields that a template may read."""
QUESTION, ANSWER = {"role": "user", "content": "A question?"}, {"role": ASSISTANT, "content": "An answer!"}
"""Example messages; their rendering shows the text that a template writes around a message."""


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    learned: list[tuple[int, int]]
    """Spans [begin, end) of its characters, in order: one for each assistant turn."""


class TemplateRefusal(InputError):
    """A template cannot render a conversation, or a learned span is unknown. `reason` is the kind of the failure."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


REFUSED = "refused by the template"
BEGINS_OTHERWISE = "the template renders its beginning otherwise"

_rendering = threading.Lock()  # transformers keeps the spans of a rendering in the template, which threads share


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may use."""

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The tokenizer's special tokens, by the names of VARIABLES."""

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        *,
        needs_learned: bool = True,
    ) -> RenderedChat:
        """Render a conversation; with `add_generation_prompt`, the opening of the next answer ends the text.

        JSON texts as arguments of tool calls become objects if the template fails on them, or escapes their quotes.

        Raises TemplateRefusal if the template cannot render the conversation, or, with `needs_learned`, as in training,
        if the learned span of a turn is unknown. Without `needs_learned`, that span is left out.
        """
        with_objects, escaped_texts = _parse_arguments(messages)
        try:
            chat = self._render_with_spans(messages, add_generation_prompt, tools, needs_learned)
            if not any(text in chat.text for text in escaped_texts):  # the template has escaped none of them
                return chat
        except TemplateRefusal:
            if not escaped_texts:  # no argument is JSON text, so objects would not help
                raise
        return self._render_with_spans(with_objects, add_generation_prompt, tools, needs_learned)

    def standalone_source(self) -> str:
        """Return the source with statements that set the special tokens, for programs that would pass other tokens."""
        # ensure_ascii would write characters beyond 16 bits as two surrogates, which Jinja reads as two characters.
        texts = {name: json.dumps(text, ensure_ascii=False) for name, text in self.variables.items()}
        # The line ends add nothing to the rendered text: transformers has Jinja drop them after a statement.
        return "".join(f"{{% set {name} = {text} %}}\n" for name, text in texts.items()) + self.source

    def end_of_turn(self) -> str:
        """Return the learned text that the template writes after the content of an answer; "" if that is unknown."""
        try:
            text, spans = self.render([QUESTION, ANSWER])
        except TemplateRefusal:
            return ""
        return "".join(text[begin:end] for begin, end in spans).rpartition(ANSWER["content"])[2]

    def _render_with_spans(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools | None, needs_learned: bool
    ) -> RenderedChat:
        """Render a conversation, and find the learned spans if the template does not mark them."""
        chat = self._render_once(messages, add_generation_prompt, tools)
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

    def _span(self, messages: Sequence[Message], turn: int, chat: str, tools: Tools | None) -> tuple[int, int] | None:
        """Return the learned span of message number `turn`, an answer, in the text `chat`; None if it is unknown.

        The span begins after the opening of the answer and ends where the text of the message ends. If the template
        writes a mark after the content, the span ends with the mark, before white space that follows the mark.
        """
        content = (messages[turn].get("content") or "").strip()
        try:
            text = self._render_once(messages[: turn + 1], False, tools).text  # ends with the answer
            if any(message["role"] != "system" for message in messages[:turn]):
                before = self._render_once(messages[:turn], True, tools).text
            else:  # few templates can render no message or a system message alone
                # The opening of a further answer, after this one, shows where the opening of this one is.
                opening = self._render_once(messages[: turn + 1], True, tools).text.removeprefix(text).lstrip()
                landmark = opening or content  # if the template writes no opening, the span begins with the content
                if text.count(landmark) != 1:
                    return None
                before = text.partition(landmark)[0] + opening
        except TemplateRefusal:
            return None
        if not chat.startswith(text) or not text.startswith(before):
            return None
        span = text[len(before) :]
        content_at = span.find(content)
        if content_at >= 0:
            has_mark = bool(span[content_at + len(content) :].strip())
        else:  # the span lacks the content's beginning, since the opening has it; or the template changed the content
            has_mark = not content.endswith(span.strip())
        return len(before), len(text.rstrip() if has_mark else text)

    def _render_once(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> RenderedChat:
        """Render messages as transformers' `apply_chat_template` does; the learned spans are the generation blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        stated = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            with _rendering:
                (text,), spans = render_jinja_template(
                    [stated],
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=GENERATION.search(self.source) is not None,
                    **self.variables,
                )
            text.encode()  # raises if the template has written an unpaired surrogate, which UTF-8 cannot hold
        except Exception as error:  # a template may fail in any way
            reason = (" ".join(str(error).split()) or type(error).__name__)[:1000]
            raise TemplateRefusal(
                f"the chat template cannot render the conversation ({reason}); change it, or use another template",
                REFUSED,
            ) from error
        learned = sorted(spans[0]) if spans else []  # one list of spans, since one conversation is rendered
        if any(end > next_begin for (_, end), (next_begin, _) in itertools.pairwise(learned)):
            raise TemplateRefusal(
                "the chat template has {% generation %} blocks within each other, or in a macro; mark each turn once, "
                "outside of macros",
                REFUSED,
            )
        return RenderedChat(text, learned)


# -- tools


def function_of(stated: Any) -> Mapping[str, Any] | None:
    """Return the function of a tool or call, stated as `{"function": {…}}` or alone; None if it has no name."""
    function = stated.get("function", stated) if isinstance(stated, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return function if isinstance(name, str) and name else None


def _parse_arguments(messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
    """Return messages whose tool calls' arguments are parsed from JSON text, and these texts as JSON strings.

    The strings show whether a template has escaped a text: it writes one of them then, with or without escaped Unicode.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages, []
    parsed, escaped_texts = copy.deepcopy([dict(message) for message in messages]), []
    for function in (function_of(call) for message in parsed for call in message.get("tool_calls") or ()):
        try:
            text: str = function["arguments"]  # type: ignore[index]  # a call without a function is left as it is
            arguments = json.loads(text)
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            escaped_texts += [json.dumps(text, ensure_ascii=ascii_only) for ascii_only in (True, False)]
            function["arguments"] = arguments  # type: ignore[index]
    return parsed, escaped_texts


# -- the template of a tokenizer


def find_template(
    tokenizer_path: str | Path, named: str | Path | None = None, *, eod_id: int | None = None
) -> ChatTemplate:
    """Return the template `named` (a Jinja file, `olmo`, or None: the tokenizer's) with the tokenizer's special tokens.

    `tokenizer_config.json` states the tokens. If it states no `eos_token`, or if `eod_id` is given, `eos_token` is the
    tokenizer's piece that ends a text. Raises InputError if there is no template, or if it is invalid.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    path = Path(tokenizer_path)
    if named is None:
        source = read_template(_folder_of(path))
        if source is None:
            raise InputError(
                f"tokenizer {path} has no chat template ({CHAT_TEMPLATE_JINJA}, or one in {TOKENIZER_CONFIG}); name a"
                f" Jinja file as --chat-template, or {OLMO} for the paper's form"
            )
    else:
        source = OLMO_TEMPLATE if str(named) == OLMO else _read(Path(named))
    try:
        render_jinja_template([], chat_template=source)  # without a conversation, this only compiles the template
    except (TemplateSyntaxError, RecursionError) as error:
        where = f"line {error.lineno}: {error.message}" if isinstance(error, TemplateSyntaxError) else str(error)
        raise InputError(f"the chat template is not valid Jinja, {where}; fix it") from error
    return ChatTemplate(source, _special_tokens(path, eod_id))


def read_standalone_template(folder: Path, tokenizer: Path) -> str | None:
    """Return a folder's template, which sets the special tokens of `tokenizer` itself; None if there is no template."""
    source = read_template(folder)
    if source is None:
        return None
    tokens = _special_tokens(tokenizer)
    unset = [name for name in tokens if name in source and f"set {name} =" not in source]  # read, but not yet set
    return ChatTemplate(source, {name: tokens[name] for name in unset}).standalone_source()


def _folder_of(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _special_tokens(tokenizer_path: Path, eod_id: int | None = None) -> dict[str, str]:
    """Return a tokenizer's special tokens by their names in templates, as `find_template` describes."""
    config = read_json_config(_folder_of(tokenizer_path) / TOKENIZER_CONFIG)
    variables = {name: text for name in VARIABLES if (text := token_text(config.get(name))) is not None}
    if eod_id is not None or "eos_token" not in variables:
        tokenizer = load_tokenizer(tokenizer_path, eod_id=eod_id, needs_eod=False)
        if tokenizer.eod_id >= 0:
            variables["eos_token"] = tokenizer.piece(tokenizer.eod_id)
    return variables


def attached_files(tokenizer: Path | None, chat_template: str | None, *, eod_id: int | None = None) -> dict[str, bytes]:
    """Return the contents, by file name, of the files that keep a tokenizer and a chat template in a checkpoint.

    If `eod_id` or a file beside the tokenizer states the end of text, a generation_config.json states it too.
    """
    files = {} if chat_template is None else {CHAT_TEMPLATE_JINJA: chat_template.encode()}
    if tokenizer is not None:
        files[f"tokenizer{tokenizer.suffix}"] = tokenizer.read_bytes()
        loaded = load_tokenizer(tokenizer, eod_id=eod_id, needs_eod=False)
        if loaded.eod_source is not None:
            files[GENERATION_CONFIG] = f'{{"eos_token_id": {loaded.eod_id}}}\n'.encode()
    return files


def read_template(folder: Path) -> str | None:
    """Return the template in a tokenizer's folder; None if there is none.

    It is `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`; of several there, the default one.
    """
    if (folder / CHAT_TEMPLATE_JINJA).is_file():
        return _read(folder / CHAT_TEMPLATE_JINJA)
    stated = read_json_config(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(stated, list):
        by_name = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = by_name.get("default")
    return stated if isinstance(stated, str) else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat template: {file} cannot be read ({error}); name a Jinja file") from error


# -- token ids


def chat_pieces(tokenizer: Tokenizer, chat: RenderedChat) -> Iterator[tuple[str | int, bool]]:
    """Yield the texts and special ids that a conversation consists of, each with whether it is learned.

    Texts are cut where learned spans begin and end, and at the special pieces that `cut_at_special` finds.
    """
    bounds = [0, *itertools.chain.from_iterable(chat.learned), len(chat.text)]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        is_learned = number % 2 == 1  # the text before the first span, the span, the text after it, …
        yield from ((piece, is_learned) for piece in tokenizer.cut_at_special(chat.text[begin:end]))


def encode_chat(tokenizer: Tokenizer, chat: RenderedChat) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a rendered conversation, [tokens] int64, and whether each is learned, [tokens] bool."""
    ids: list[int] = []
    learned: list[bool] = []
    for piece, is_learned in chat_pieces(tokenizer, chat):
        piece_ids = [piece] if isinstance(piece, int) else tokenizer.encode(piece)
        ids += piece_ids
        learned += [is_learned] * len(piece_ids)
    return np.array(ids, np.int64), np.array(learned, bool)


def refuse_space_before_texts(tokenizer: Tokenizer) -> None:
    """Raise InputError if a tokenizer puts a space before every text, and so before every part of a conversation."""
    if tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode("b")]) != "ab":
        raise InputError(
            f"tokenizer {tokenizer.path} puts a space before every text, so that conversations, which are encoded in"
            " parts, would get spaces that they do not have; use one without (add_dummy_prefix or add_prefix_space off)"
        )
