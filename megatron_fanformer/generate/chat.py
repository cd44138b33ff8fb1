"""The verb `chat`: a conversation in a terminal or a pipe, with a key/value cache that is kept from turn to turn."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megatron_fanformer import terminal
from megatron_fanformer.data.chat_template import (
    ChatTemplate,
    Message,
    encode_chat,
    find_template,
    refuse_space_before_texts,
)
from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.generate import Continuation
from megatron_fanformer.generate.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.generate.verb import ChatConfig
from megatron_fanformer.runtime.device import return_freed_memory

ANSWER_SHARE = 4  # without `max_new_tokens`, an answer has room for the context's tokens divided by this number
RESET, QUIT = "/reset", "/quit"
HINT = f"{RESET} begins anew; {QUIT} or Ctrl-D ends; Ctrl-C ends an answer, twice the program"


@contextmanager
def open_chat(config: ChatConfig) -> Iterator["Chat"]:
    """Yield a new chat, in a process group of this process alone. Raises InputError before weights are read."""
    if problems := config.problems():
        raise InputError("\n".join(problems))
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, eod_id=config.eod_id)
    if (config.max_new_tokens or 0) >= source.config.seq_length:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}, which leaves no room for a message in the "
            f"{source.config.seq_length} tokens that the model was trained on; set it lower"
        )
    template = find_template(tokenizer.path, config.chat_template, eod_id=source.end_of_text_id)
    refuse_space_before_texts(tokenizer)
    with load_model(source.path) as model:
        yield Chat(model, tokenizer, template, config)


class Chat:
    """A conversation with a model: the messages, and a key/value cache of their tokens, so far as they were read."""

    def __init__(self, model: TrainedModel, tokenizer: Tokenizer, template: ChatTemplate, config: ChatConfig) -> None:
        self._tokenizer, self._template, self._config = tokenizer, template, config
        self._context_tokens = model.config.seq_length
        self._decoder = model.decoder(1, self._context_tokens)
        self._cached_ids: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation with the same system message."""
        system = self._config.system
        self.num_dropped_turns = 0
        """The number of turns left out so far to make room for later ones."""
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Add a message; generate the answer and yield, for each of its tokens, the new text, which may be empty.

        If the caller stops early, the conversation keeps the text generated so far. Raises InputError if the message is
        too long for the context or the template refuses it; the conversation then stays as it was.
        """
        ids = self._make_room([*self._messages, {"role": "user", "content": text}])
        free_tokens = self._context_tokens - len(ids)
        max_new_tokens = min(self._config.max_new_tokens or free_tokens, free_tokens)
        answer = Continuation(self._tokenizer, ids, self._config, max_new_tokens=max_new_tokens, stop=self._config.stop)
        num_yielded = 0  # characters
        try:
            while answer.ended_by is None:
                answer.choose_token(self._logits_after([*ids, *answer.ids]))
                final_text = answer.final_text
                yield final_text[num_yielded:]
                num_yielded = len(final_text)
        finally:
            self._messages.append({"role": "assistant", "content": answer.text})
            return_freed_memory()  # kept memory seldom fits: the attention of each token has another size

    def _make_room(self, messages: list[Message]) -> list[int]:
        """Drop the oldest turns until an answer has room; keep the other messages, and return their tokens."""
        needed_tokens = self._config.max_new_tokens or self._context_tokens // ANSWER_SHARE
        num_dropped = 0
        while True:
            chat = self._template.render(messages, add_generation_prompt=True, needs_learned=False)
            ids: list[int] = encode_chat(self._tokenizer, chat)[0].tolist()
            turn_starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
            if len(ids) + needed_tokens <= self._context_tokens or len(turn_starts) < 2:
                break
            messages = [*messages[: turn_starts[0]], *messages[turn_starts[1] :]]
            num_dropped += 1
        if len(ids) >= self._context_tokens:
            raise InputError(
                f"the message makes {len(ids)} tokens with what stands before it, and the model was trained on "
                f"{self._context_tokens}; write a shorter one"
            )
        self._messages, self.num_dropped_turns = messages, self.num_dropped_turns + num_dropped
        return ids

    def _logits_after(self, ids: list[int]) -> Tensor:
        """Return the logits [v] of the token after `ids`; the model reads only tokens that are not in the cache."""
        pairs = zip(self._cached_ids, ids[:-1], strict=False)  # the last id is read in any case, for its logits
        num_cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._decoder.rewind(num_cached)
        self._cached_ids = ids[:num_cached]  # what the cache holds even if Ctrl-C interrupts `next_logits`
        (logits_v,) = self._decoder.next_logits(torch.tensor([ids[num_cached:]]))
        self._cached_ids = ids
        return logits_v


# -- input and output


def talk(config: ChatConfig) -> None:
    """Answer each line of standard input, from a terminal or a pipe; write only the answers to standard output.

    In a terminal, a message that cannot be answered may be rephrased, and Ctrl-C twice without a line in between ends
    the conversation. A pipe ends with the first such message, which raises InputError, or the first Ctrl-C.
    """
    with open_chat(config) as chat:
        if not sys.stdin.isatty():
            _talk_in_pipe(chat)
            return
        with suppress(ImportError):
            import readline  # noqa: F401  (then input() lets users edit the line)
        _talk_in_terminal(chat)


def _talk_in_pipe(chat: Chat) -> None:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            if not _handle_line(chat, line.decode("utf-8-sig").rstrip("\r\n")):
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
            if not _handle_line(chat, line):
                return
        except EOFError:
            return print()  # ends the line on which Ctrl-D was typed
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            print()
            _print_notice(HINT)
        except InputError as error:
            _print_notice(str(error))


def _handle_line(chat: Chat, text: str) -> bool:
    """Carry out a command, or answer a message; return whether the conversation goes on."""
    command = text.strip()
    if command == RESET:
        chat.reset()
    elif command and command != QUIT:
        had_dropped_turns = chat.num_dropped_turns > 0
        for piece in chat.answer(text):
            print(piece, end="", flush=True)
        print(flush=True)
        if chat.num_dropped_turns and not had_dropped_turns:
            _print_notice("the conversation is longer than the model's context; its oldest turns are left out")
    return command != QUIT


def _print_notice(line: str) -> None:
    terminal.print_stderr(f"megatron-fanformer: {line}")
