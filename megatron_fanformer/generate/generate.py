"""The verb `generate`: samples tokens, decodes them, continues several prompts in one batch, and prints the texts.

A prompt has the same continuation in a batch as alone. megatron-core's key/value cache keeps all rows of a batch at the
same position, and its causal mask allows no padding. So the model first reads as many tokens of each prompt as the
shortest prompt has, and then one token per row and step: the next one of the prompt while there is one, otherwise the
token chosen last. This costs next to nothing if the prompts of a batch have about the same length.

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
CONTEXT_TOKENS = 8  # the prompt's last tokens, decoded before new ones: tokenizers may decode a first token differently
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a decoder returns it for a character with missing bytes


def token_probabilities(logits_v: Tensor, config: SamplingConfig) -> Tensor:
    """Return the probabilities [v] float64 of the next token, at a temperature above 0.

    The temperature is applied first, then top-k, then top-p to what top-k keeps. Of equal logits, the lower id leads.
    """
    # The largest logit becomes 0, which no temperature, however low, can make infinite.
    scaled_v = (logits_v.double() - logits_v.max()) / config.temperature
    ranked_logits, ids = scaled_v.sort(descending=True, stable=True)
    if config.top_k:
        ranked_logits, ids = ranked_logits[: config.top_k], ids[: config.top_k]
    ranked = ranked_logits.softmax(0)
    mass_before = ranked.cumsum(0) - ranked
    ranked = ranked * (mass_before < config.top_p)
    return torch.zeros_like(scaled_v).scatter(0, ids, ranked / ranked.sum())


def next_token(logits_v: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """Choose the next token by its logits [v]; the CPU draws, so that all devices give the same tokens.

    Raises DivergenceError if a logit is not finite.
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
    """Decodes the new tokens after a prompt, up to the first stop string.

    The end of text is not decoded, nor are ids that the model's vocabulary has and the tokenizer's lacks.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # Decoded before new tokens, since a tokenizer may decode the first of its tokens differently.
        self._context = self._with_text(prompt_ids)[-CONTEXT_TOKENS:]
        self._context_characters = len(tokenizer.decode(self._context))
        self.text = ""
        self.is_stopped = False

    def update(self, ids: Sequence[int]) -> None:
        """Set `text` and `is_stopped` from all new tokens so far."""
        text = self._tokenizer.decode(self._context + self._with_text(ids))[self._context_characters :]
        stop_places = [place for place in map(text.find, self._stop) if place >= 0]
        self.is_stopped = bool(stop_places)
        self.text = text[: min(stop_places)] if stop_places else text

    @property
    def final(self) -> str:
        """Return the start of `text` that no later token changes: without an incomplete character or stop string."""
        if self.is_stopped:
            return self.text
        text = self.text.rstrip(INCOMPLETE)
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        return text[: len(text) - max((len(start) for start in beginnings if text.endswith(start)), default=0)]

    def _with_text(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that are decoded."""
        size, end = self._tokenizer.vocab_size, self._tokenizer.eod_id
        return [token for token in ids if token < size and token != end]


class Continuation:
    """A prompt of at least one token, and the new tokens after it.

    The draws depend only on the seed, the prompt and the number `sample`. The tokenizer's end of text, a string of
    `stop` or the number `max_new_tokens` (at least 1) ends the continuation.
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
        """The new tokens, including the end of text or the stop string."""
        self.ended_by: EndedBy | None = None
        name = f"sample {sample} of {' '.join(map(str, prompt_ids))}"
        self._sampling, self._generator = sampling, generator_for(sampling.seed, name)
        self._end_of_text_id = tokenizer.eod_id
        self._new_text = NewText(tokenizer, prompt_ids, stop)

    @property
    def length(self) -> int:
        """Return the number of tokens in the prompt and after it."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def text(self) -> str:
        """Return the new text, without the end of text and without a stop string."""
        return self._new_text.text

    @property
    def final_text(self) -> str:
        """Return the start of `text` that no later token changes."""
        return self._new_text.text if self.ended_by else self._new_text.final

    def choose_token(self, logits_v: Tensor) -> None:
        """Choose the next token by its logits [v]. Raises DivergenceError if a logit is not finite."""
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
    """Continue prompts to their ends, in batches of about equal length, the longest first.

    After each batch, `on_batch` is called with the number of continuations that have ended.
    """
    by_length = sorted(rows, key=lambda row: -row.length)
    for first in range(0, len(by_length), batch_size):
        continue_together(model, by_length[first : first + batch_size])
        on_batch(min(first + batch_size, len(by_length)))


def continue_together(model: TrainedModel, continuations: Sequence[Continuation]) -> None:
    """Continue prompts to their ends in one batch; a row leaves the batch when it has ended."""
    return_freed_memory()  # that of an earlier batch, whose lengths were others
    rows = list(continuations)
    shortest = min(row.length for row in rows)
    decoder = model.decoder(len(rows), max(row.length + row.max_new_tokens for row in rows))
    logits_bv = decoder.next_logits(torch.tensor([row.prompt_ids[:shortest] for row in rows]))
    for num_cached in itertools.count(shortest):  # tokens of each row in the cache
        for row, logits_v in zip(rows, logits_bv.cpu(), strict=True):
            if row.length == num_cached:  # all of the row is read; otherwise the prompt has the next token
                row.choose_token(logits_v)
        unfinished = [number for number, row in enumerate(rows) if row.ended_by is None]
        if not unfinished:
            return
        if len(unfinished) < len(rows):
            decoder.keep_rows(unfinished)
            rows = [rows[number] for number in unfinished]
        next_ids = [[*row.prompt_ids, *row.ids][num_cached] for row in rows]
        logits_bv = decoder.next_logits(torch.tensor(next_ids)[:, None])


# -- the verb


def generate(config: GenerateConfig) -> Iterator[Continuation]:
    """Continue `config.prompts`, at least one; yield all samples of the first prompt, then those of the next.

    A continuation does not depend on the other prompts or on the batch size, except that floating-point sums in another
    order can tip a near tie. Raises InputError if an option is wrong, a prompt is too long, or no model is found.
    """
    if problems := config.problems():
        raise InputError("\n".join(problems))
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, eod_id=config.eod_id)
    # An empty prompt becomes the end of text, which stands before every document but the first.
    prompts = [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in config.prompts]
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
    """Print each prompt with its continuation, or with `config.json` a line of JSON for each continuation.

    If there are several texts, a line with the text's number stands before each.
    """
    if config.prompts_file is not None:
        config = replace(config, prompts=(*config.prompts, *read_prompts(config.prompts_file)))
    if not config.prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    is_single = len(config.prompts) * config.num_samples == 1
    for number, row in enumerate(generate(config)):
        prompt_number, sample = divmod(number, config.num_samples)
        prompt = config.prompts[prompt_number]
        if config.json:
            values = {"prompt": prompt, "sample": sample, "text": row.text, "ended_by": row.ended_by, "ids": row.ids}
            print(json.dumps(values), flush=True)
            continue
        if not is_single:
            suffix = f", sample {sample + 1}" if config.num_samples > 1 else ""
            print("\n" * (number > 0) + f"--- prompt {prompt_number + 1}{suffix}")
        print(prompt + row.text, flush=True)
