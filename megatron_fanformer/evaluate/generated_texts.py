"""Texts that a model writes for the documents of a task: settings, prompts cut to the model's length, and scores.

A document is a dict of JSON's values, as a request file keeps it. What is used here: `prompt`, `stop` (strings that end
a text) and `max_new_tokens`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.code_execution import Limits
from megatron_fanformer.generate.continuation import Continuation, continue_all
from megatron_fanformer.generate.models import TrainedModel
from megatron_fanformer.generate.verb import SamplingConfig

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingConfig):
    """The settings by which texts are written and judged."""

    max_new_tokens: int | None = None
    """The most tokens of a text; None: the task's own number, at most half of the model's length."""
    batch_size: int = 16
    """Texts written together; it does not change them."""
    allow_code_execution: bool = False
    """Whether programs that the model writes may be run (`code_execution` says how)."""
    limits: Limits = field(default_factory=Limits)
    """Resource limits of each such program."""

    def length_problems(self, seq_length: int) -> list[str]:
        """List the settings that do not suit a model of sequences of that length."""
        if self.max_new_tokens is None or self.max_new_tokens < seq_length:
            return []
        return [
            f"max_new_tokens is {self.max_new_tokens}, which leaves no room for a prompt in the {seq_length} tokens "
            f"that the model was trained on; set it below {seq_length}"
        ]


@dataclass(frozen=True, kw_only=True)
class Written:
    """The texts that were written for one document."""

    texts: list[Continuation]
    """One text for each sample."""
    prompt_cut: int
    """Tokens cut from the prompt's beginning for lack of room."""

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the texts as a result keeps them."""
        return [{"text": one.text, "tokens": len(one.ids), "ended_by": one.ended_by} for one in self.texts]


def write_texts(
    model: TrainedModel,
    tokenizer: Tokenizer,
    documents: Sequence[dict[str, Any]],
    settings: GenerationSettings,
    *,
    log: Log = lambda line: None,
) -> list[Written]:
    """Continue each document's prompt; a prompt that leaves too little room loses its beginning.

    Raises:
        InputError: `max_new_tokens` leaves no room for any prompt.
        DivergenceError: the model's logits are not finite.
    """
    longest = model.config.seq_length
    if problems := settings.length_problems(longest):
        raise InputError("\n".join(problems))
    prompts = tokenizer.encode_batch([document["prompt"] for document in documents])
    written = []
    for document, ids in zip(documents, prompts, strict=True):
        new_tokens = settings.max_new_tokens or min(document["max_new_tokens"], longest // 2)
        kept = (ids or [tokenizer.eod_id])[new_tokens - longest :]
        texts = [
            Continuation(tokenizer, kept, settings, sample=sample, max_new_tokens=new_tokens, stop=document["stop"])
            for sample in range(settings.num_samples)
        ]
        written.append(Written(texts=texts, prompt_cut=max(len(ids) - len(kept), 0)))
    every = [text for one in written for text in one.texts]
    continue_all(
        model, every, batch_size=settings.batch_size, on_batch=lambda ended: log(f"{ended:,} of {len(every):,} texts")
    )
    return written


def prompts_cut(written: Sequence[Written]) -> int:
    """Return the number of prompts that lost their beginning."""
    return sum(one.prompt_cut > 0 for one in written)
