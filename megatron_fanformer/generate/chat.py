"""`chat`: a conversation in a terminal or a pipe, with a key/value cache that is kept from turn to turn."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megatron_fanformer import terminal
from megatron_fanformer.data.chat_template import (
    ChatTemplate,
    Message,
    encode_chat,
    find_template,
    refuse_spaces_between,
)
from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.generate import Continuation
from megatron_fanformer.generate.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.generate.verb import ChatConfig
from megatron_fanformer.runtime.device import return_freed_memory

FREE_SHARE = 4  # one part in so many of the context is kept free for an answer of unstated length
RESET, QUIT = "/reset", "/quit"
HINT = f"{RESET} begins anew; {QUIT} or Ctrl-D ends; Ctrl-C ends an answer, twice the program"


@contextmanager
def open_chat(config: ChatConfig) -> Iterator["Chat"]:
    """Load a model to talk to, in a process group of this process alone; errors are found before weights are read."""
    if problems := config.problems():
        raise InputError("\n".join(problems))
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, eod_id=config.eod_id)
    if (config.max_new_tokens or 0) >= source.config.seq_length:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}, which leaves no room for a message in the "
            f"{source.config.seq_length} tokens that the model was trained on; set it lower"
        )
    template = find_template(tokenizer.path, config.chat_template, eod_id=source.end_of_text_id)
    refuse_spaces_between(tokenizer)
    with load_model(source.path) as model:
        yield Chat(model, tokenizer, template, config)


class Chat:
    """A conversation: its messages, and the tokens that the model's cache holds of it."""

    def __init__(self, model: TrainedModel, tokenizer: Tokenizer, template: ChatTemplate, config: ChatConfig) -> None:
        self._tokenizer, self._template, self._config = tokenizer, template, config
        self._context_tokens = model.config.seq_length
        self._decoder = model.decoder(1, self._context_tokens)
        self._cached_ids: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew; the system message stays."""
        system = self._config.system
        self.forgotten = 0
        """Number of turns left out to make room."""
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Add a message, and yield the answer as it is generated: for each token its new text, which may be empty.

        Whatever was generated joins the conversation, even if the caller breaks off. A message that is too long for
        the context, or refused by the template, raises InputError and leaves the conversation as it was.
        """
        ids = self._make_room([*self._messages, {"role": "user", "content": text}])
        room = self._context_tokens - len(ids)
        most = min(self._config.max_new_tokens or room, room)
        answer = Continuation(self._tokenizer, ids, self._config, max_new_tokens=most, stop=self._config.stop)
        written = 0
        try:
            while answer.ended_by is None:
                answer.take(self._logits_after([*ids, *answer.ids]))
                settled = answer.settled_text
                yield settled[written:]
                written = len(settled)
        finally:
            self._messages.append({"role": "assistant", "content": answer.text})
            return_freed_memory()  # each token's attention was of another size

    def _make_room(self, messages: list[Message]) -> list[int]:
        """Drop a conversation's oldest turns until an answer has room; keep the rest, and return its tokens."""
        needed_tokens = self._config.max_new_tokens or self._context_tokens // FREE_SHARE
        dropped_turns = 0
        while len(ids := self._encode(messages)) + needed_tokens > self._context_tokens:
            turns = [number for number, message in enumerate(messages) if message["role"] == "user"]
            if len(turns) < 2:
                break
            messages, dropped_turns = [*messages[: turns[0]], *messages[turns[1] :]], dropped_turns + 1
        if len(ids) >= self._context_tokens:
            raise InputError(
                f"the message makes {len(ids)} tokens with what stands before it, and the model was trained on "
                f"{self._context_tokens}; write a shorter one"
            )
        self._messages, self.forgotten = messages, self.forgotten + dropped_turns
        return ids

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        chat = self._template.render(messages, add_generation_prompt=True, needs_learned=False)
        ids, _ = encode_chat(self._tokenizer, chat)
        return [int(token) for token in ids]

    def _logits_after(self, ids: list[int]) -> Tensor:
        """Return the logits [v] of the token after `ids`; the model reads only those that the cache does not hold."""
        pairs = enumerate(zip(self._cached_ids, ids[:-1], strict=False))
        known = next((place for place, (old, new) in pairs if old != new), min(len(self._cached_ids), len(ids) - 1))
        self._decoder.rewind(known)
        self._cached_ids = ids[:known]  # should the reading be broken off
        (logits_v,) = self._decoder.next_logits(torch.tensor([ids[known:]]))
        self._cached_ids = ids
        return logits_v


# -- input and output


def talk(config: ChatConfig) -> None:
    """Answer the lines of standard input, a terminal's or a pipe's, until it ends.

    Standard output has nothing but the answers. A message that cannot be answered may be rephrased in a terminal, and
    ends a pipe with InputError; Ctrl-C ends a pipe, and a terminal if it comes twice without a line in between.
    """
    with open_chat(config) as chat:
        if not sys.stdin.isatty():
            _talk_in_pipe(chat)
            return
        with suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines by it)
        _talk_in_terminal(chat)


def _talk_in_pipe(chat: Chat) -> None:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            if not _carry_out(chat, line.decode("utf-8-sig").rstrip("\r\n")):
                return
        except UnicodeDecodeError:
            raise InputError(f"line {number} of the messages is not valid UTF-8; write them in that") from None
        except InputError as error:
            raise InputError(f"line {number} of the messages: {error}") from None


def _talk_in_terminal(chat: Chat) -> None:
    _print_notice(HINT)
    is_interrupted = False
    while True:
        try:
            line = input("> " if sys.stdout.isatty() else "")
            is_interrupted = False
            if not _carry_out(chat, line):
                return
        except EOFError:
            return print()
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            print()
            _print_notice(HINT)
        except InputError as error:
            _print_notice(str(error))


def _carry_out(chat: Chat, text: str) -> bool:
    """Carry out a command or answer a message; return False where the conversation is to end."""
    command = text.strip()
    if command == RESET:
        chat.reset()
    elif command and command != QUIT:
        forgotten = chat.forgotten
        for piece in chat.answer(text):
            print(piece, end="", flush=True)
        print(flush=True)
        if chat.forgotten and not forgotten:
            _print_notice("the conversation is longer than the model's context; its oldest turns are left out")
    return command != QUIT


def _print_notice(line: str) -> None:
    terminal.print_stderr(f"megatron-fanformer: {line}")
