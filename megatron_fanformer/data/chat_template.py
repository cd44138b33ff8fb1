"""Chat templates: from the messages of a conversation to a text, of which spans are learned, and to token ids.

Templates are Jinja, as tokenizers on Hugging Face carry them; OLMo's form, in which the paper's data are prepared, is
built in as one. They run in Jinja's sandbox, in a process whose time and memory are bounded (`chat_renderer.py`). What
is learned is each assistant turn: its content and its end of text. A template says so by `{% generation %}` blocks;
without them, a turn is what it adds to the rendering of the messages before it.

The text is cut at the edges of these spans before it is encoded: no token is partly learned, and a prompt, which ends
where an answer begins, has the ids that it has in training.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from megatron_fanformer.data import chat_renderer
from megatron_fanformer.data.chat_renderer import BEGIN, END
from megatron_fanformer.data.chat_tools import Tools, has_escaped_arguments, left_out, with_objects
from megatron_fanformer.data.tokenizer import (
    CHAT_TEMPLATE_JINJA,
    GENERATION_CONFIG,
    LARGEST_BESIDE_BYTES,
    TOKENIZER_CONFIG,
    Tokenizer,
    load_tokenizer,
    read_beside,
    token_text,
)
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.processes import read_message, write_message

OLMO = "olmo"
ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")
SET = re.compile(r'\{% set (\w+) = "(?:[^"\\]|\\.)*" %\}\n')  # as `_with_set` writes it

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
"""One message: its `role`, and its `content`, a text, or None beside `tool_calls`; a tool's may have `name` and
`tool_call_id`."""


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    learned: list[tuple[int, int]]
    """Spans [begin, end) of its characters, in order: one for each assistant turn."""


class TemplateRefusal(InputError):
    """A template cannot render a conversation, or not so that what is learned is known."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """Why it failed, in the same words for all conversations that fail this way."""


class TemplateTooLarge(InputError):
    """A template takes more time or memory than any that renders conversations: it is not tried with another one."""


REFUSED = "refused by the template"
BEGINS_OTHERWISE = "the template renders its beginning otherwise"
LEAVES_OUT = "the template leaves out"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may use.

    Raises InputError if it is not valid Jinja.
    """

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that the tokenizer has, of bos_token, eos_token, pad_token and unk_token."""

    def __post_init__(self) -> None:
        try:
            _rendered(self, [], [])
        except _Refused as error:
            raise InputError(f"the chat template is not valid Jinja, {error}; fix it") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        *,
        needs_learned: bool = True,
    ) -> RenderedChat:
        """Return the text of a conversation, with what opens the assistant's next turn where `add_generation_prompt`.

        Arguments of tool calls are given as stated; those that are JSON text as objects where the template cannot
        render the text, or would escape it.

        Args:
            needs_learned: whether it is refused where what is learned is unknown, for training; else such turns have no
                span.

        Raises:
            TemplateRefusal: it cannot render this one, or leaves out tools or a message of a role that it does not
                know.
            TemplateTooLarge: it takes too much time or memory.
        """
        others = with_objects(messages)
        try:
            chat = self._rendered(messages, add_generation_prompt, tools, needs_learned)
        except TemplateRefusal:
            if others is None:
                raise
            chat = self._rendered(others, add_generation_prompt, tools, needs_learned)
        else:
            if others is not None and has_escaped_arguments(messages, chat.text):
                chat = self._rendered(others, add_generation_prompt, tools, needs_learned)
        if (what := left_out(messages, tools, chat.text)) is not None:
            raise TemplateRefusal(
                f"the chat template leaves out {what}; use one that knows them", f"{LEAVES_OUT} {what}"
            )
        return chat

    def _rendered(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools | None, needs_learned: bool
    ) -> RenderedChat:
        is_marked = GENERATION.search(self.source) is not None
        turns = [] if is_marked else _assistant_turns(messages)
        # Without marks, of each turn: what comes before it, with the opening of an answer, and with it.
        renderings = [(turn + ahead, not ahead) for turn in turns for ahead in (0, 1)]
        marked, lengths = self._text(messages, [(len(messages), add_generation_prompt), *renderings], tools)
        try:
            marked.replace(BEGIN, "").replace(END, "").encode()
        except UnicodeEncodeError as error:
            raise TemplateRefusal(
                "the chat template writes an unpaired surrogate, which no text can hold; fix it", REFUSED
            ) from error
        if is_marked:
            return _without_marks(marked)
        spans = []
        for turn, before, after in zip(turns, lengths[::2], lengths[1::2], strict=True):
            if before is not None and after is not None and before <= after:
                spans.append(_turn(messages[turn], marked, before, after))
            elif needs_learned:
                raise TemplateRefusal(
                    f"the chat template renders the messages before message {turn} (from 0) otherwise once others "
                    "follow, so that what is learned is unknown; mark it in the template by {% generation %} blocks",
                    BEGINS_OTHERWISE,
                )
        return RenderedChat(marked, spans)

    def with_variables(self) -> str:
        """Return its source with the special tokens set: the same text, whichever tokens another program gives it."""
        return _with_set(self.source, self.variables)

    def _text(
        self, messages: Sequence[Message], renderings: Sequence[tuple[int, bool]], tools: Tools | None
    ) -> tuple[str, list[int | None]]:
        try:
            return _rendered(self, messages, renderings, tools)
        except _Refused as error:
            raise TemplateRefusal(
                f"the chat template cannot render the conversation ({error}); change it, or use another template",
                REFUSED,
            ) from error


def _with_set(source: str, variables: Mapping[str, str]) -> str:
    # Characters as they are: Jinja reads JSON's pair of surrogates as two characters, which no text can hold.
    texts = {name: json.dumps(text, ensure_ascii=False) for name, text in variables.items()}
    # the line end that follows is no text: blocks are trimmed
    return "".join(f"{{% set {name} = {text} %}}\n" for name, text in texts.items()) + source


def _turn(message: Message, text: str, before: int, after: int) -> tuple[int, int]:
    """Return the span of an assistant turn: what it adds to the messages before it and the opening of an answer.

    White space after the mark that ends the turn is left out of it.

    Args:
        before: how many characters of the text come before it.
        after: the same, with the turn.
    """
    span, content = text[before:after], (message["content"] or "").strip()
    closing = span.partition(content)[2] if content else span
    return before, before + len(span.rstrip() if closing.strip() else span)


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]


def _without_marks(marked: str) -> RenderedChat:
    parts = re.split(f"({BEGIN}|{END})", marked)
    position, begin = 0, None
    spans: list[tuple[int, int]] = []
    for part in parts:
        if part == BEGIN:
            begin = position
        elif part == END and begin is not None:
            spans.append((begin, position))
            begin = None
        elif part not in (BEGIN, END):
            position += len(part)
    return RenderedChat("".join(part for part in parts if part not in (BEGIN, END)), spans)


# -- the process that renders


class _Refused(Exception):
    """A rendering that the template itself has ended."""


class _Renderer:
    """The process of `chat_renderer.py`, and what becomes of a template that ends it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", chat_renderer.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        renderings: Sequence[tuple[int, bool]],
        tools: Tools | None,
    ) -> tuple[str, list[int | None]]:
        """Render the first so many messages, with an opening of an answer or without, for each of `renderings`.

        Returns the first one's text, and of each other how many of its characters it is; None: it does not begin it.

        Raises:
            _Refused: by the template, or it is not valid; says why.
            TemplateTooLarge: it takes more time or memory than a template may.
            FanformerError: something else has ended the process.
        """
        request = {
            "source": template.source,
            "variables": dict(template.variables),
            "messages": [dict(message) for message in messages],
            "renderings": renderings,
            "tools": tools,
        }
        content = json.dumps(request).encode()
        assert self._process.stdin is not None and self._process.stdout is not None
        seconds, most_bytes = chat_renderer.cpu_seconds(len(content)), chat_renderer.memory_bytes(len(content))
        with suppress(BrokenPipeError):
            limits = (str(seconds).encode(), str(most_bytes).encode())
            write_message(cast(BinaryIO, self._process.stdin), content, *limits)
        answer = read_message(cast(BinaryIO, self._process.stdout))
        kind, *parts = answer or (b"",)
        if kind == chat_renderer.RENDERED:
            return parts[0].decode("utf-8", "surrogatepass"), json.loads(parts[1])
        if kind == chat_renderer.REFUSED:
            raise _Refused(parts[0].decode())
        if kind == chat_renderer.TOO_LARGE:
            raise _too_large(f"{most_bytes >> 20} MiB of memory", len(content))
        self.close()
        _renderers.clear()
        if self._process.returncode == -signal.SIGXCPU:
            raise _too_large(f"{seconds} s of CPU time", len(content))
        raise FanformerError(
            f"the process that renders chat templates ended with exit code {self._process.returncode}; free memory, "
            "and run the same command again"
        )

    def close(self) -> None:
        """End the process, which nothing can keep from it."""
        self._process.kill()
        self._process.communicate()


def _too_large(what: str, request_bytes: int) -> TemplateTooLarge:
    return TemplateTooLarge(
        f"the chat template takes more than {what} for a conversation of {request_bytes:,} bytes; it repeats too much: "
        "use another template"
    )


_renderers: list[_Renderer] = []
"""The renderer of this process, once there is one; a fork gets another."""
_one_at_a_time = threading.Lock()


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Message],
    renderings: Sequence[tuple[int, bool]],
    tools: Tools | None = None,
) -> tuple[str, list[int | None]]:
    with _one_at_a_time:
        if not _renderers or _renderers[0].owner != os.getpid():
            _renderers[:] = [_Renderer()]
            atexit.register(_renderers[0].close)
        return _renderers[0].render(template, messages, renderings, tools)


# -- found


def find_template(
    tokenizer_path: str | Path, named: str | Path | None = None, *, eod_id: int | None = None
) -> ChatTemplate:
    """Return the template of a tokenizer: a Jinja file or `olmo` where named, else what lies beside the tokenizer.

    That is `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`, in the tokenizer's folder. Special
    tokens are those of `tokenizer_config.json`; where it states no `eos_token`, and wherever `eod_id` is given, the end
    of text is the tokenizer's own piece.

    Raises:
        InputError: there is none, or it cannot be read, or is not valid Jinja.
    """
    path = Path(tokenizer_path)
    if named is None:
        source = own_template(_folder_of(path))
        if source is None:
            raise InputError(
                f"tokenizer {path} has no chat template ({CHAT_TEMPLATE_JINJA}, or one in {TOKENIZER_CONFIG}); name a"
                f" Jinja file as --chat-template, or {OLMO} for the paper's form"
            )
    else:
        source = OLMO_TEMPLATE if str(named) == OLMO else _read(Path(named), "a Jinja file")
    return ChatTemplate(source, _special_tokens(path, eod_id))


def template_of(folder: Path, tokenizer: Path) -> str | None:
    """Return the template in a folder with a tokenizer's special tokens set, as it may lie elsewhere; None where there
    is none.

    Those that it does not name, or begins by setting, are left out: what is converted again stays the same.

    Raises InputError if it or the tokenizer cannot be read.
    """
    source = own_template(folder)
    if source is None:
        return None
    begun, end = set(), 0
    while line := SET.match(source, end):
        begun.add(line[1])
        end = line.end()
    tokens = _special_tokens(tokenizer).items()
    return _with_set(source, {name: text for name, text in tokens if name in source and name not in begun})


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
    """Read the small files that go into a checkpoint, by their names there: a tokenizer's by its kind, which its suffix
    says. Where one is moved or replaced later, nothing changes.

    An end of text that is stated, by `eod_id` or beside the tokenizer, is stated there too.
    """
    found = {} if chat_template is None else {CHAT_TEMPLATE_JINJA: chat_template.encode()}
    if tokenizer is not None:
        found[f"tokenizer{tokenizer.suffix}"] = tokenizer.read_bytes()
        read = load_tokenizer(tokenizer, eod_id=eod_id, needs_eod=False)
        if read.eod_source is not None:
            found[GENERATION_CONFIG] = f'{{"eos_token_id": {read.eod_id}}}\n'.encode()
    return found


def own_template(folder: Path) -> str | None:
    """Return the template in a tokenizer's folder, in Jinja, as `find_template` finds it; None where there is none.

    Raises InputError if it cannot be read.
    """
    if (folder / CHAT_TEMPLATE_JINJA).is_file():
        return _read(folder / CHAT_TEMPLATE_JINJA, "a Jinja file")
    stated = read_beside(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(stated, list):  # several by name
        named = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


def _read(file: Path, what: str) -> str:
    try:
        return regular_file(file, most_bytes=LARGEST_BESIDE_BYTES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat template: {file} cannot be read ({error}); name {what}") from error


# -- encoded


def chat_pieces(tokenizer: Tokenizer, chat: RenderedChat) -> Iterator[tuple[str | int, bool]]:
    """Yield a conversation cut where what is learned begins and ends: texts to encode, ids; whether each is learned."""
    position = 0
    for begin, end in chat.learned:
        for start, stop, learned in ((position, begin, False), (begin, end, True)):
            yield from ((piece, learned) for piece in tokenizer.cut_at_special(chat.text[start:stop]))
        position = end
    yield from ((piece, False) for piece in tokenizer.cut_at_special(chat.text[position:]))


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
