"""Options of `generate` and `chat`; imports nothing that is slow."""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.options import argument, not_an_option, option

SEED_LIMIT = 2**63
SAMPLING = "sampling"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen."""

    temperature: float = option(0.0, group=SAMPLING)
    """Divides the logits; 0 takes the most likely token, and the options below have no effect."""
    top_k: int = option(0, group=SAMPLING)
    """Sample from the k most likely tokens alone; 0: from all."""
    top_p: float = option(1.0, group=SAMPLING)
    """Sample from the most likely tokens that together have this probability, in (0, 1]; at least one."""
    seed: int = option(0, group=SAMPLING)
    """Seed of the draws: equal seeds and settings give equal text."""
    num_samples: int = not_an_option(1)
    """Texts for each prompt; several need a temperature above 0."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(
                f"temperature is {self.temperature}; it must be finite and not negative (0 takes the most likely token)"
            )
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}; it must not be negative (0 samples from all tokens)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; it must lie in (0, 1] (1 samples from all tokens)")
        if not 0 <= self.seed < SEED_LIMIT:
            problems.append(f"seed is {self.seed}; it must lie in [0, 2**63)")
        problems += self._below_one("num_samples")
        if self.num_samples > 1 and self.temperature == 0:
            problems.append(
                f"num_samples is {self.num_samples}, but temperature 0 takes the most likely tokens each time; set a "
                "temperature above 0, or num_samples to 1"
            )
        return problems

    def _below_one(self, *names: str) -> list[str]:
        values = {name: getattr(self, name) for name in names}
        return [f"{name} is {n}; it must be at least 1" for name, n in values.items() if n is not None and n < 1]


@dataclass(frozen=True, kw_only=True)
class _TextConfig(SamplingConfig):
    """The model, and the strings that end its texts."""

    checkpoint: str = argument()
    """A run's folder, one checkpoint, the URL of one, or an exported Hugging Face folder."""
    tokenizer: str | None = None
    """A .model, a tokenizer.json or a folder that holds one, instead of the checkpoint's own."""
    eod_id: int | None = option(None, metavar="ID")
    """The id that ends a document (default: the export's, or the tokenizer's end of text)"""
    stop: tuple[str, ...] = option((), repeated=True)
    """End before this string, which is not part of the text; may be repeated."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        return [*super().problems(), *(["a stop string is empty; leave it out"] if "" in self.stop else [])]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(_TextConfig):
    """What to continue, with which model, and how."""

    prompts: tuple[str, ...] = option((), name="--prompt", repeated=True)
    """Text to continue; an empty one: a new document; may be repeated."""
    prompts_file: Path | None = option(None, name="--prompts", metavar="FILE")
    """File of texts to continue: one a line, or JSON lines with "prompt"."""
    num_samples: int = 1
    """Continuations of each prompt; several need a temperature above 0."""
    max_new_tokens: int = 64
    """The most tokens of a continuation; it has fewer if the document ends earlier, or at a stop string."""
    batch_size: int = 16
    """Continuations that are decoded together; it does not change them."""
    json: bool = False
    """Print a JSON object a line for each continuation."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        problems = [*super().problems(), *self._below_one("max_new_tokens", "batch_size")]
        return problems if self.prompts else [*problems, "there is no prompt; name at least one"]


@dataclass(frozen=True, kw_only=True)
class ChatConfig(_TextConfig):
    """The model to chat with, and how it answers."""

    system: str | None = option(None, metavar="TEXT")
    """Instruction to the model, before the conversation."""
    chat_template: str | None = option(None, metavar="FILE")
    """Jinja template, or olmo: the authors' form (default: the template next to the tokenizer)"""
    max_new_tokens: int | None = None
    """The most tokens of an answer (default: what the model's context holds)"""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        return [*super().problems(), *self._below_one("max_new_tokens")]
