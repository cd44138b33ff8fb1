"""The options of the verbs `generate` and `chat`, and the reading of files of prompts; imports nothing slow."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import Verb, argument, count, option
from megatron_fanformer.runtime import device

SAMPLING = "sampling"
AnyConfig = TypeVar("AnyConfig", "GenerateConfig", "ChatConfig")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options that decide how the next token is chosen."""

    temperature: float = option(0.0, group=SAMPLING)
    """Divides the logits; 0 takes the most likely token, and the options below have no effect."""
    top_k: int = option(0, group=SAMPLING)
    """Sample from the k most likely tokens alone; 0: from all."""
    top_p: float = option(1.0, group=SAMPLING)
    """Sample from the most likely tokens that together have this probability, in (0, 1]; at least one."""
    seed: int = option(0, group=SAMPLING)
    """Seed of the draws: equal seeds and settings give equal text."""

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
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed is {self.seed}; it must lie in [0, 2**63)")
        return problems


@dataclass(frozen=True, kw_only=True)
class _TextConfig(SamplingConfig):
    """Options that `generate` and `chat` share."""

    checkpoint: str = argument()
    """A run's folder, one checkpoint, the URL of one, or an exported Hugging Face folder."""
    tokenizer: str | None = None
    """A .model, a tokenizer.json or a folder that holds one, instead of the checkpoint's own."""
    eod_id: int | None = option(None, metavar="ID")
    """The id that ends a document (default: the export's, or the tokenizer's end of text)"""
    stop: tuple[str, ...] = option((), repeated=True)
    """End before this string, which is not part of the text; may be repeated."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(_TextConfig):
    """Options of `generate`."""

    prompts: tuple[str, ...] = option((), name="--prompt", repeated=True)
    """Text to continue; an empty one: a new document; may be repeated."""
    prompts_file: Path | None = option(None, name="--prompts", metavar="FILE")
    """File of texts to continue: one a line, or (.jsonl) JSON lines with "prompt"."""
    num_samples: int = option(1, parse=count)
    """Continuations of each prompt; several need a temperature above 0."""
    max_new_tokens: int = option(64, parse=count)
    """The most tokens of a continuation; it has fewer if the document ends earlier, or at a stop string."""
    batch_size: int = option(16, parse=count)
    """Continuations that are decoded together; it does not change them."""
    json: bool = False
    """Print a JSON object a line for each continuation."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        problems = super().problems()
        if self.num_samples > 1 and self.temperature == 0:
            problems.append(
                f"num_samples is {self.num_samples}, but temperature 0 takes the most likely tokens each time; set a "
                "temperature above 0, or num_samples to 1"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class ChatConfig(_TextConfig):
    """Options of `chat`."""

    system: str | None = option(None, metavar="TEXT")
    """Instruction to the model, before the conversation."""
    chat_template: str | None = option(None, metavar="FILE")
    """Jinja template, or olmo: the authors' form (default: the template next to the tokenizer)"""
    max_new_tokens: int | None = option(None, parse=count)
    """The most tokens of an answer (default: what the model's context holds)"""


def _fetch_and_check(config: AnyConfig) -> tuple[AnyConfig]:
    """Return the options with a local path in place of a URL, and prepare the import of megatron-core."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import RUNNABLE, recognize

    checkpoint = on_this_machine(config.checkpoint)
    recognize(checkpoint, RUNNABLE)  # now, to report an error before torch is imported
    device.prepare_megatron()
    return (replace(config, checkpoint=checkpoint),)


class _Prompt(msgspec.Struct):
    """A line of a .jsonl file of prompts; other fields of the line are ignored."""

    prompt: str


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file, one from each line that is not blank.

    Raises InputError if the file cannot be read, is not UTF-8 or holds no prompt, or if a line of a .jsonl file is not
    an object with a text `prompt`.
    """
    try:
        text = regular_file(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"prompts {path} cannot be read ({error.strerror}); name a text or JSON lines file") from error
    except UnicodeDecodeError:
        raise InputError(f"prompts {path} are not valid UTF-8; write them in that") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            is_json = path.suffix == ".jsonl"
            prompts.append(msgspec.json.decode(line, type=_Prompt).prompt if is_json else line.removesuffix("\r"))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(
                f'line {number} of prompts {path} is not a JSON object with a text in "prompt" ({error}); write one a '
                "line"
            ) from None
    if not prompts:
        raise InputError(f"prompts {path} holds no prompt; write one a line")
    return prompts


GENERATE = Verb(
    name="generate",
    help="Continue prompts.",
    options=GenerateConfig,
    run="megatron_fanformer.generate.generate:print_generations",
    before=_fetch_and_check,
    examples=(
        'generate runs/demo/run --prompt "def main("',
        "generate exported-folder --prompt Once\n--temperature 0.8 --top-p 0.95 --seed 1",
    ),
)


CHAT = Verb(
    name="chat",
    help="Talk to a model that was fine-tuned on chats.",
    options=ChatConfig,
    run="megatron_fanformer.generate.chat:talk",
    before=_fetch_and_check,
    examples=('chat runs/sft --system "Answer briefly."', "chat exported-folder --temperature 0.7 --top-p 0.9"),
    notes=(
        "At the prompt, /reset begins anew, and /quit or Ctrl-D ends; Ctrl-C ends an answer, twice the "
        "program. From a pipe, each line is a message, and the answers alone are printed."
    ),
)
