"""The verb `convert`, and its options; imports nothing that is slow."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import Verb, argument, option, path_or_none
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show, width

MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`."""

    source: str = argument()
    """A checkpoint of ours or its URL, a Hugging Face folder, a checkpoint of the authors or of Megatron-LM."""
    destination: Path = argument()
    """A folder that does not exist yet."""
    to: Literal["megatron", "hf", "reference"] = option()
    """Target format: a checkpoint of ours, a Hugging Face folder, or a checkpoint in the authors' format."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """Configuration file with fields of model that a Megatron-LM checkpoint does not state."""
    tokenizer: Path | None = option(None, parse=path_or_none)
    """Tokenizer to put beside the weights, where the source has none."""
    eod_id: int | None = None
    """The id that ends a document (default: the tokenizer's end of text)"""
    dtype: Literal["fp32", "bf16"] | None = None
    """Number format of the written weights (default: the source's own)"""
    padded_vocab_size: int | None = option(None, metavar="N")
    """Rows of the embedding (default: the source's own; for hf the token ids alone)"""
    max_shard_size: str = option(MAX_SHARD_SIZE, metavar="SIZE")
    """The largest file of a Hugging Face folder's weights."""
    verified: bool = option(True, name="--no-verify")
    """Verify the result before it is published."""
    receipt: Path | None = option(None, name="--report", metavar="FILE")
    """Write the receipt as JSON, with the files' hashes."""


def _convert(options: ConvertOptions) -> None:
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.formats.recognition import MODELS, recognise

    source = on_this_machine(options.source)
    recognise(source, MODELS)  # anything else is reported before torch is imported
    if found := file_problems(report=options.receipt):
        raise InputError("\n".join(found))
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.formats.convert import convert_checkpoint

    done = convert_checkpoint(dataclasses.replace(options, source=source))
    show([f"wrote {options.destination}", *done.lines(width())])


CONVERT = Verb(
    name="convert",
    help="Convert between our checkpoints, Hugging Face and the reference.",
    options=ConvertOptions,
    run=_convert,
    examples=(
        "convert runs/demo/run exported-folder --to hf",
        "convert FANformer-1B runs/released --to megatron\n--tokenizer tokenizer.json",
    ),
    results_are_files=True,
)
