"""`generate`: sampled tokens, their text, the decoding of several prompts in one batch, and their output.

Several are continued together, by megatron-core's key/value cache, to the text that each has alone. The cache gives all
rows of a batch the same position, and megatron-core's causal mask has no room for padding. So a batch begins with as
many tokens as its shortest prompt has, and then goes on token by token: a row whose prompt is longer is given its own
next token until it has been read, and only then chooses one. Nothing is padded, every position is the row's own, and a
batch of prompts of about one length loses next to nothing.

Shapes: b batch, s sequence, v vocabulary.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.generate.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.generate.verb import GenerateConfig, SamplingConfig, read_prompts
from megatron_fanformer.runtime.device import return_freed_memory
from megatron_fanformer.runtime.seeding import generator_for

EndedBy = Literal["end_of_text", "stop", "length"]
CONTEXT_TOKENS = 8  # of the prompt, decoded with the new ones: a tokenizer may decode a text's first token otherwise
CUT_OFF = "\N{REPLACEMENT CHARACTER}"  # a decoder returns it for a character with missing bytes


def token_probabilities(logits_v: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution [v] that is drawn from at a temperature above 0: float64, zero where a token is cut off.

    Temperature comes first, then top-k, then top-p on the rest. Among equal logits the lower id ranks first.
    """
    # Shifted to a maximum of 0, so that no temperature, however low, makes the most likely token's logit infinite.
    scaled_v = (logits_v.double() - logits_v.max()) / config.temperature
    ranked, ids = scaled_v.sort(descending=True, stable=True)
    if config.top_k:
        ranked, ids = ranked[: config.top_k], ids[: config.top_k]
    ranked = ranked.softmax(0)
    mass_before = ranked.cumsum(0) - ranked
    ranked = ranked * (mass_before < config.top_p)
    return torch.zeros_like(scaled_v).scatter(0, ids, ranked / ranked.sum())


def next_token(logits_v: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """Choose the next token from logits [v] on any device; the draw is the CPU's, the same for all devices.

    Raises:
        DivergenceError: a logit is not finite.
    """
    logits_v = logits_v.float().cpu()
    if not logits_v.isfinite().all():
        raise DivergenceError(
            "the model's logits are not all finite, so its weights have diverged; use an earlier checkpoint"
        )
    if config.temperature == 0:
        return int(logits_v.argmax())
    return int(torch.multinomial(token_probabilities(logits_v, config), 1, generator=generator))


# -- one continuation


class NewText:
    """The text of new tokens, decoded after the prompt, up to the first stop string.

    Ids that the model's vocabulary has and the tokenizer does not, like the end of text, have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._context = self._with_text(prompt_ids)[-CONTEXT_TOKENS:]
        self._context_length = len(tokenizer.decode(self._context))
        self.text = ""
        self.is_stopped = False

    def update(self, ids: Sequence[int]) -> None:
        """Decode all new tokens so far."""
        text = self._tokenizer.decode(self._context + self._with_text(ids))[self._context_length :]
        places = [place for place in map(text.find, self._stop) if place >= 0]
        self.is_stopped = bool(places)
        self.text = text[: min(places)] if places else text

    @property
    def settled(self) -> str:
        """The part of the text that no further token changes: no cut-off character, no beginning of a stop string."""
        if self.is_stopped:
            return self.text
        text = self.text.rstrip(CUT_OFF)
        begun = (
            length for stop in self._stop for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length])
        )
        return text[: len(text) - max(begun, default=0)]

    def _with_text(self, ids: Sequence[int]) -> list[int]:
        size, end = self._tokenizer.vocab_size, self._tokenizer.eod_id
        return [token for token in ids if token < size and token != end]


class Continuation:
    """A prompt of at least one token, and its new ones, which the seed, the prompt and `sample` alone decide.

    Ended by the tokenizer's end of text, a `stop` string, or `max_new_tokens`, at least one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        max_new_tokens: int,
        sample: int = 0,
        stop: Sequence[str] = (),
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.ids: list[int] = []
        """New tokens; they end with the end of text or a stop string once that is reached."""
        self.ended_by: EndedBy | None = None
        name = f"sample {sample} of {' '.join(map(str, prompt_ids))}"  # draws do not depend on torch's global state
        self._sampling, self._generator = sampling, generator_for(sampling.seed, name)
        self._end_of_text_id = tokenizer.eod_id
        self._new_text = NewText(tokenizer, prompt_ids, stop)

    @property
    def length(self) -> int:
        """Tokens so far, the prompt's and new ones."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def text(self) -> str:
        """The new text, without the end of text and without a stop string."""
        return self._new_text.text

    @property
    def settled_text(self) -> str:
        """Return the beginning of `text` that is final."""
        return self._new_text.text if self.ended_by else self._new_text.settled

    def take(self, logits_v: Tensor) -> None:
        """Choose the next token from its logits [v]; raises as `next_token`."""
        self.ids.append(next_token(logits_v, self._sampling, self._generator))
        self._new_text.update(self.ids)
        if self.ids[-1] == self._end_of_text_id:
            self.ended_by = "end_of_text"
        elif self._new_text.is_stopped:
            self.ended_by = "stop"
        elif len(self.ids) == self.max_new_tokens:
            self.ended_by = "length"


# -- several together


def continue_all(
    model: TrainedModel, rows: Sequence[Continuation], batch_size: int, on_batch: Callable[[int], None] = lambda _: None
) -> None:
    """Continue prompts to their ends, in batches of about one length, the longest first.

    Each batch ends with `on_batch(number of continuations that have ended)`.
    """
    by_length = sorted(rows, key=lambda row: -row.length)
    for first in range(0, len(by_length), batch_size):
        continue_together(model, by_length[first : first + batch_size])
        on_batch(min(first + batch_size, len(by_length)))


def continue_together(model: TrainedModel, continuations: Sequence[Continuation]) -> None:
    """Continue prompts as one batch to their ends; rows that have ended leave it."""
    return_freed_memory()  # which an earlier batch of other lengths has left
    rows = list(continuations)
    given = min(row.length for row in rows)
    decoder = model.decoder(len(rows), max(row.length + row.max_new_tokens for row in rows))
    logits_bv = decoder.next_logits(torch.tensor([row.prompt_ids[:given] for row in rows]))
    for length in itertools.count(given):  # tokens of each row in the cache
        for row, logits_v in zip(rows, logits_bv.cpu(), strict=True):
            if row.length == length:
                row.take(logits_v)
        left = [number for number, row in enumerate(rows) if row.ended_by is None]
        if not left:
            return
        if len(left) < len(rows):
            decoder.keep(left)
            rows = [rows[number] for number in left]
        next_ids = [[*row.prompt_ids, *row.ids][length] for row in rows]
        logits_bv = decoder.next_logits(torch.tensor(next_ids)[:, None])


# -- the verb


def generate(config: GenerateConfig) -> Iterator[Continuation]:
    """Continue prompts, at least one, and yield the samples of the first, then those of the next, batch by batch.

    A text depends on the model, the settings, the seed, its prompt and the sample's number alone: neither on the other
    prompts nor on the batch, but for sums of floating-point numbers in another order, which can tip a near tie.
    """
    if problems := config.problems():
        raise InputError("\n".join(problems))
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, eod_id=config.eod_id)
    prompts = [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in config.prompts]  # documents follow one
    new_tokens, seq_length = config.max_new_tokens, source.config.seq_length
    number, longest = max(enumerate(map(len, prompts), start=1), key=lambda numbered: numbered[1])
    if longest + new_tokens > seq_length:
        raise InputError(
            f"prompt {number}'s {longest} tokens and max_new_tokens {new_tokens} make {longest + new_tokens}, over the "
            f"{seq_length} that the model was trained on; shorten it, or lower max_new_tokens"
        )
    rows = [
        Continuation(tokenizer, prompt, config, sample=sample, max_new_tokens=new_tokens, stop=config.stop)
        for prompt in prompts
        for sample in range(config.num_samples)
    ]
    with load_model(source.path) as model:
        for first in range(0, len(rows), config.batch_size):
            batch = rows[first : first + config.batch_size]
            continue_together(model, batch)
            yield from batch


def print_generations(config: GenerateConfig) -> None:
    """Continue prompts and print each with its continuation, or as an object a line with `config.json`.

    Several are separated by a line before each; a single one has none, so that the output is the text itself.
    """
    if config.prompts_file is not None:
        config = replace(config, prompts=(*config.prompts, *read_prompts(config.prompts_file)))
    if not config.prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    is_single = len(config.prompts) * config.num_samples == 1
    for number, one in enumerate(generate(config)):
        place, sample = divmod(number, config.num_samples)
        prompt = config.prompts[place]
        if config.json:
            values = {"prompt": prompt, "sample": sample, "text": one.text, "ended_by": one.ended_by, "ids": one.ids}
            print(json.dumps(values), flush=True)
            continue
        if not is_single:
            suffix = f", sample {sample + 1}" if config.num_samples > 1 else ""
            print("\n" * (number > 0) + f"--- prompt {place + 1}{suffix}")
        print(prompt + one.text, flush=True)
