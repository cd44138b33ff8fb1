"""`generate`: continues prompts with a trained model, and prints the texts as they grow."""

import functools
import json
import sys
from collections.abc import Callable, Sequence

from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.continuation import Continuation, continue_together
from megatron_fanformer.generate.models import find_model_and_tokenizer, load_model
from megatron_fanformer.generate.verb import GenerateConfig


def generate(
    config: GenerateConfig, watch: Callable[[int, Sequence[Continuation]], None] = lambda first, batch: None
) -> list[Continuation]:
    """Continue prompts, at least one: the samples of the first, then those of the next.

    A text depends on the model, the settings, the seed, its prompt and the sample's number alone: neither on the other
    prompts nor on the batch, but for sums of floating-point numbers in another order, which can tip a near tie.

    Args:
        watch: called after each step of a batch with the number of its first continuation, and its continuations;
            both are in the order of the result.

    Raises:
        InputError: settings are wrong, the checkpoint or its tokenizer is missing, or a prompt is too long: all
            problems together, before weights are read.
        CorruptError: the checkpoint is damaged.
        DivergenceError: the model's logits are not finite.
    """
    problems = config.problems()
    source, tokenizer = find_model_and_tokenizer(config.checkpoint, config.tokenizer, problems, eod_id=config.eod_id)
    if problems or source is None or tokenizer is None:
        raise InputError("\n".join(problems))
    prompts = [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in config.prompts]  # documents follow one
    _check_lengths(prompts, config.max_new_tokens, source.config.seq_length)
    rows = [
        Continuation(tokenizer, prompt, config, sample=sample, max_new_tokens=config.max_new_tokens, stop=config.stop)
        for prompt in prompts
        for sample in range(config.num_samples)
    ]
    with load_model(source.path) as model:
        for first in range(0, len(rows), config.batch_size):
            batch = rows[first : first + config.batch_size]
            continue_together(model, batch, functools.partial(watch, first, batch))
    return rows


def _check_lengths(prompts: Sequence[Sequence[int]], new_tokens: int, seq_length: int) -> None:
    """Refuse texts beyond the positions that the model was trained on; the longest prompt stands for all."""
    number, longest = max(enumerate(map(len, prompts), start=1), key=lambda numbered: numbered[1])
    if longest + new_tokens <= seq_length:
        return
    name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
    raise InputError(
        f"{name}'s {longest} tokens and max_new_tokens {new_tokens} make {longest + new_tokens}, over the {seq_length} "
        "that the model was trained on; shorten it, or lower max_new_tokens"
    )


def print_generations(config: GenerateConfig, write: Callable[[str], object] | None = None) -> None:
    """Continue prompts and write each with its continuation, in order, as far as each is known.

    Several are separated by a line before each; a single one has none, so that the output is the text itself. With
    `config.json` it is an object a line, when a continuation has ended: prompt, sample, text, ended_by, ids.

    Raises:
        InputError, CorruptError, DivergenceError: those of `generate`.
    """
    write = write or functools.partial(print, end="", flush=sys.stdout.isatty())
    generate(config, _OrderedWriter(config, write))


class _OrderedWriter:
    """Writes the continuations in order: the first that has not ended as it grows, those after it when it has."""

    def __init__(self, config: GenerateConfig, write: Callable[[str], object]) -> None:
        self._config, self._write = config, write
        self._render = self._json_line if config.json else self._text
        self._number = self._written = 0  # of the continuation that is being written, and how much of it is

    def __call__(self, first: int, batch: Sequence[Continuation]) -> None:
        while self._number < first + len(batch):
            continuation = batch[self._number - first]
            number, sample = divmod(self._number, self._config.num_samples)
            text = self._render(continuation, number, sample)
            self._write(text[self._written :])
            self._written = len(text)
            if not continuation.ended_by:
                return
            self._write("\n")
            self._number, self._written = self._number + 1, 0

    def _text(self, continuation: Continuation, number: int, sample: int) -> str:
        heading = ""
        if len(self._config.prompts) * self._config.num_samples > 1:
            suffix = f", sample {sample + 1}" if self._config.num_samples > 1 else ""
            heading = ("\n" if self._number else "") + f"--- prompt {number + 1}{suffix}\n"
        return heading + self._config.prompts[number] + continuation.settled_text

    def _json_line(self, continuation: Continuation, number: int, sample: int) -> str:
        if not continuation.ended_by:
            return ""
        values = {"prompt": self._config.prompts[number], "sample": sample, "text": continuation.text}
        return json.dumps({**values, "ended_by": continuation.ended_by, "ids": continuation.ids})
