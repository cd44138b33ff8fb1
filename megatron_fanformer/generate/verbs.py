"""The verbs `generate` and `chat`, and files of prompts; imports nothing that is slow."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.config import ChatConfig, GenerateConfig
from megatron_fanformer.options import Verb
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import print_loading

JSON_LINES = (".jsonl", ".ndjson")
MOST_BYTES = 1 << 30  # of a file of prompts


class _Prompt(msgspec.Struct):
    """A line of a JSON file of prompts; other fields of it are not read."""

    prompt: str


def _generate(config: GenerateConfig) -> None:
    config = replace(config, checkpoint=_runnable(config.checkpoint))
    if config.prompts_file is not None:
        config = replace(config, prompts=(*config.prompts, *read_prompts(config.prompts_file)))
    if not config.prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    print_loading(config.checkpoint)
    device.prepare_megatron()
    from megatron_fanformer.generate.generate import print_generations

    print_generations(config, functools.partial(print, end="", flush=sys.stdout.isatty()))


def _chat(config: ChatConfig) -> None:
    config = replace(config, checkpoint=_runnable(config.checkpoint))
    print_loading(config.checkpoint)
    device.prepare_megatron()
    from megatron_fanformer.generate.talking import talk

    talk(config)


def _runnable(checkpoint: str) -> str:
    """Return the checkpoint on this machine; anything that cannot be run is reported before torch is imported."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import RUNNABLE, recognise

    checkpoint = on_this_machine(checkpoint)
    recognise(checkpoint, RUNNABLE)
    return checkpoint


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, in order; lines of white space alone are passed over.

    A file named .jsonl or .ndjson has a JSON object with the field `prompt` on each line, and prompts of several lines
    need one. In any other file each line is a prompt.

    Raises:
        InputError: it cannot be read, is not UTF-8, holds no prompt, or a line is not such an object.
    """
    try:
        lines = regular_file(path, most_bytes=MOST_BYTES).read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"prompts {path} cannot be read ({error.strerror}); name a text or JSON lines file") from error
    except UnicodeDecodeError:
        raise InputError(f"prompts {path} are not valid UTF-8; write them in that") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"prompts {path} holds no prompt; write one a line")
    if path.suffix not in JSON_LINES:
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            prompts.append(msgspec.json.decode(line, type=_Prompt).prompt)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(
                f'line {number} of prompts {path} is not a JSON object with a text in "prompt" ({error}); write one a '
                "line"
            ) from None
    return prompts


GENERATE = Verb(
    name="generate",
    help="Continue prompts.",
    options=GenerateConfig,
    run=_generate,
    examples=(
        'generate runs/demo/run --prompt "def main("',
        "generate exported-folder --prompt Once\n--temperature 0.8 --top-p 0.95 --seed 1",
    ),
)


CHAT = Verb(
    name="chat",
    help="Talk to a model that was fine-tuned on chats.",
    options=ChatConfig,
    run=_chat,
    examples=(
        'chat runs/sft --system "Answer briefly."',
        "chat exported-folder --temperature 0.7 --top-p 0.9",
    ),
    notes=(
        "At the prompt, /reset begins anew, and /quit or Ctrl-D ends; Ctrl-C ends an answer, twice the "
        "program. From a pipe, each line is a message, and the answers alone are printed."
    ),
)
