"""`chat`: a conversation with a model whose key/value cache is kept from turn to turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_fanformer.data.chat_template import (
    ChatTemplate,
    Message,
    encode_chat,
    find_template,
    refuse_spaces_between,
)
from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.generate.config import ChatConfig
from megatron_fanformer.generate.continuation import Continuation
from megatron_fanformer.generate.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.runtime.device import return_freed_memory

FREE_SHARE = 4
"""One part in so many of the context is kept free for an answer of unstated length."""


@contextmanager
def open_chat(config: ChatConfig) -> Iterator["Chat"]:
    """Load a model to talk to, in a process group of this process alone.

    Raises:
        InputError: settings are wrong, the checkpoint, its tokenizer or its template is missing: all problems
            together, before weights are read.
        CorruptError: the checkpoint is damaged.
    """
    problems = config.problems()
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, problems, eod_id=config.eod_id)
    template = None
    if source is not None:
        if (config.max_new_tokens or 0) >= source.config.seq_length:
            problems.append(
                f"max_new_tokens is {config.max_new_tokens}, which leaves no room for a message in the "
                f"{source.config.seq_length} tokens that the model was trained on; set it lower"
            )
        if tokenizer is not None:
            named, end = config.chat_template, source.end_of_text_id
            template = collect_problems(problems, lambda: find_template(tokenizer.path, named, eod_id=end))
            collect_problems(problems, lambda: refuse_spaces_between(tokenizer))
    if problems or source is None or tokenizer is None or template is None:
        raise InputError("\n".join(problems))
    with load_model(source.path) as model:
        yield Chat(model, tokenizer, template, config)


class Chat:
    """A conversation: its messages, and the tokens that the model's cache holds of it."""

    def __init__(self, model: TrainedModel, tokenizer: Tokenizer, template: ChatTemplate, config: ChatConfig) -> None:
        self._tokenizer, self._template, self._config = tokenizer, template, config
        self._context_tokens = model.config.seq_length
        self._decoder = model.decoder(1, self._context_tokens)
        self._read: list[int] = []  # the tokens in the cache
        self.reset()

    def reset(self) -> None:
        """Begin anew; the system message stays."""
        system = self._config.system
        self.forgotten = 0
        """Number of turns left out to make room."""
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Add a message, and yield the answer as it is generated: for each token its new text, which may be empty.

        Whatever was generated joins the conversation, even if the caller breaks off.

        Raises:
            InputError: the message is too long for the model's context, or the template refuses it; the conversation
                is as before then.
            DivergenceError: the model's logits are not finite.
        """
        ids = self._with_room([*self._messages, {"role": "user", "content": text}])
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

    def _with_room(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, whose oldest turns are left out until an answer has room."""
        wanted = self._config.max_new_tokens or self._context_tokens // FREE_SHARE
        left_out = 0
        while len(ids := self._ids(messages)) + wanted > self._context_tokens:
            rest = _without_oldest_turn(messages)
            if rest is None:
                break
            messages, left_out = rest, left_out + 1
        if len(ids) >= self._context_tokens:
            raise InputError(
                f"the message makes {len(ids)} tokens with what stands before it, and the model was trained on "
                f"{self._context_tokens}; write a shorter one"
            )
        self._messages, self.forgotten = messages, self.forgotten + left_out
        return ids

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        chat = self._template.render(messages, add_generation_prompt=True, needs_learned=False)
        ids, _ = encode_chat(self._tokenizer, chat)
        return [int(token) for token in ids]

    def _logits_after(self, ids: list[int]) -> Tensor:
        """Return the logits [v] of the token after `ids`; the model reads only those that the cache does not hold."""
        known = min(_common(self._read, ids), len(ids) - 1)
        self._decoder.rewind(known)
        self._read = ids[:known]  # should the reading be broken off
        (logits_v,) = self._decoder.next_logits(torch.tensor([ids[known:]]))
        self._read = ids
        return logits_v


def _without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages without the first of the user's and its answer; None where only the last one would be left
    out.
    """
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return None if len(starts) < 2 else [*messages[: starts[0]], *messages[starts[1] :]]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((place for place in range(shorter) if left[place] != right[place]), shorter)
