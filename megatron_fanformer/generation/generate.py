"""`generate`: continues a prompt with a trained model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.generation.models import ModelSource, TrainedModel, find_model, load_model
from megatron_fanformer.generation.sampling import Sampler, SamplingConfig

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """What to continue, with which model, and how."""

    checkpoint: str
    """A run's folder, one checkpoint, or an exported Hugging Face folder."""
    prompt: str
    """Text to continue; empty: a new document."""
    max_new_tokens: int = 64
    """At most this many; fewer if the document ends earlier."""
    tokenizer: str | None = None
    """A .model, a tokenizer.json or a folder that holds one; None: the checkpoint's own."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = super().problems()
        if self.max_new_tokens < 1:
            found.append(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        return found


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A prompt's continuation."""

    text: str
    """What follows the prompt, without the end of text."""
    ids: list[int]
    """Its token ids; the last one is the end of text if that was reached."""
    prompt_ids: list[int]
    """The prompt's token ids; the end of text alone for an empty prompt."""


def generate(config: GenerateConfig) -> Generation:
    """Continue a prompt; the text depends on the model, the settings and the seed alone.

    Raises:
        InputError: settings are wrong, the checkpoint or its tokenizer is missing, or the prompt is too long: all
            problems together, before weights are read.
        CorruptError: the checkpoint is damaged.
        DivergenceError: the model's logits are not finite.
    """
    source, tokenizer = _find(config)
    prompt_ids = tokenizer.encode(config.prompt) or [tokenizer.eod_id]  # documents follow an end of text
    _check_length(len(prompt_ids), config.max_new_tokens, source.config.seq_length)
    with load_model(source.path) as model:
        new_ids = continuation(
            model,
            prompt_ids,
            max_new_tokens=config.max_new_tokens,
            sampling=config,
            end_of_text_id=tokenizer.eod_id,
        )
        ids = list(new_ids)
    return Generation(text=_new_text(tokenizer, prompt_ids, ids), ids=ids, prompt_ids=prompt_ids)


def continuation(
    model: TrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    end_of_text_id: int | None,
) -> Iterator[int]:
    """New token ids as they come, up to and including the end of text."""
    decoder = model.decoder(1, len(prompt_ids) + max_new_tokens)
    sampler = Sampler(sampling)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = sampler(decoder.next_logits(torch.tensor([ids]))[0])
        yield token
        if token == end_of_text_id:
            return
        ids = [token]


def _find(config: GenerateConfig) -> tuple[ModelSource, Tokenizer]:
    """The model and its tokenizer; all problems of the settings and of both are reported together."""
    problems = config.problems()
    source = _noting(problems, lambda: find_model(Path(config.checkpoint)))
    tokenizer = None
    if source is not None or config.tokenizer is not None:
        tokenizer = _noting(problems, lambda: _read_tokenizer(source, config.tokenizer))
    if source is not None and tokenizer is not None and tokenizer.vocab_size > source.config.vocab_size:
        problems.append(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, the model's vocabulary "
            f"{source.config.vocab_size}; name the tokenizer that the model was trained with"
        )
    if problems or source is None or tokenizer is None:
        raise InputError("\n".join(problems))
    return source, tokenizer


def _noting(problems: list[str], find: Callable[[], _T]) -> _T | None:
    """What `find` finds; None where the input is wrong, which is noted as a problem."""
    try:
        return find()
    except InputError as error:
        problems.append(str(error))
        return None


def _read_tokenizer(source: ModelSource | None, stated: str | None) -> Tokenizer:
    path = stated or (source and source.tokenizer)
    if not path:
        assert source is not None
        raise InputError(f"{source.path} holds no tokenizer; name one with --tokenizer")
    return load_tokenizer(path, eod_id=source.end_of_text_id if source else None)


def _check_length(prompt_tokens: int, new_tokens: int, seq_length: int) -> None:
    """Refuse what goes beyond the positions that the model was trained on."""
    if prompt_tokens + new_tokens <= seq_length:
        return
    room = seq_length - prompt_tokens
    remedy = f"set max_new_tokens to {room} or less" if room > 0 else f"shorten it to {seq_length - 1} or less"
    raise InputError(
        f"the prompt's {prompt_tokens} tokens and max_new_tokens {new_tokens} make {prompt_tokens + new_tokens}, over "
        f"the {seq_length} that the model was trained on; {remedy}"
    )


def _new_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """The text of `new_ids`, decoded after the prompt: a tokenizer may decode a first token differently.

    Ids that the model's vocabulary has and the tokenizer does not, like the end of text, have no text.
    """
    known = [
        [token for token in ids if token != tokenizer.eod_id and token < tokenizer.vocab_size]
        for ids in (prompt_ids, new_ids)
    ]
    return tokenizer.decode(known[0] + known[1])[len(tokenizer.decode(known[0])) :]
