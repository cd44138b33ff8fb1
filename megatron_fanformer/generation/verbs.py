"""The verbs `generate` and `chat`; imports nothing that is slow."""

import functools
import sys
from dataclasses import replace

from megatron_fanformer.errors import InputError
from megatron_fanformer.generation.config import ChatConfig, GenerateConfig
from megatron_fanformer.options import Verb
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import print_loading


def _generate(config: GenerateConfig) -> None:
    from megatron_fanformer.generation.prompts import read_prompts

    config = replace(config, checkpoint=_runnable(config.checkpoint))
    if config.prompts_file is not None:
        config = replace(config, prompts=(*config.prompts, *read_prompts(config.prompts_file)))
    if not config.prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    print_loading(config.checkpoint)
    device.prepare_megatron()
    from megatron_fanformer.generation.generate import print_generations

    print_generations(config, functools.partial(print, end="", flush=sys.stdout.isatty()))


def _chat(config: ChatConfig) -> None:
    config = replace(config, checkpoint=_runnable(config.checkpoint))
    print_loading(config.checkpoint)
    device.prepare_megatron()
    from megatron_fanformer.generation.talking import talk

    talk(config)


def _runnable(checkpoint: str) -> str:
    """The checkpoint on this machine; anything that cannot be run is reported before torch is imported."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.formats.recognition import RUNNABLE, recognise

    checkpoint = on_this_machine(checkpoint)
    recognise(checkpoint, RUNNABLE)
    return checkpoint


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
