"""The verbs `convert` and `merge`, and their options; imports nothing that is slow."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fanformer.errors import InputError
from megatron_fanformer.options import Verb, argument, option
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show

FEWEST_MERGED = 2


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`."""

    source: str = argument()
    """A checkpoint of ours or its URL, a Hugging Face folder, a checkpoint of the authors or of Megatron-LM."""
    destination: Path = argument()
    """A folder that does not exist yet."""
    to: Literal["megatron", "hf", "reference"] = option()
    """Target format: a checkpoint of ours, a Hugging Face folder, or a checkpoint in the authors' format."""
    config: Path | None = option(None, metavar="FILE")
    """Configuration file with fields of model that a Megatron-LM checkpoint does not state."""
    tokenizer: Path | None = option(None)
    """Tokenizer to put beside the weights, where the source has none."""
    eod_id: int | None = None
    """The id that ends a document (default: the source's, or the end of text of --tokenizer)"""
    dtype: Literal["fp32", "bf16"] | None = None
    """Number format of the written weights (default: the source's own)"""
    max_shard_size: str = option("5GB", metavar="SIZE")
    """The largest file of a Hugging Face folder's weights."""
    verified: bool = option(True, name="--no-verify")
    """Verify the result before it is published; its receipt.json has the proof."""


def convert(options: ConvertOptions) -> None:
    """Run `convert`."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import MODELS, recognize

    source = on_this_machine(options.source)
    recognize(source, MODELS)  # reports a wrong path before torch is imported
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.convert.convert import convert_checkpoint

    arguments: dict[str, Any] = {**vars(options), "source": Path(source)}
    show([f"wrote {options.destination}", *convert_checkpoint(**arguments)])


CONVERT = Verb(
    name="convert",
    help="Convert between our checkpoints, Hugging Face and the reference.",
    options=ConvertOptions,
    run="megatron_fanformer.convert.verb:convert",
    examples=(
        "convert runs/demo/run exported-folder --to hf",
        "convert FANformer-1B runs/released --to megatron\n--tokenizer tokenizer.json",
    ),
    removed={
        "--padded-vocab-size": "a Hugging Face folder holds the rows of token ids, and no padding",
        "--report": "the receipt is receipt.json in the new folder",
    },
)


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Options of `merge`."""

    sources: tuple[str, ...] = argument()
    """Checkpoints of ours of one model, or their URLs (a run: its latest); with --last one run."""
    output: Path = option(metavar="FOLDER")
    """A folder that does not exist yet, for the averaged checkpoint."""
    last: int | None = option(None, metavar="N")
    """Average the N newest checkpoints of the run."""
    weights: tuple[float, ...] = option((), metavar="WEIGHT")
    """A weight above 0 for each checkpoint, in their order (--last: the oldest first); each is divided by their sum
    (default: all the same)"""


def merge(options: MergeOptions) -> None:
    """Run `merge`."""
    checkpoints = _find_checkpoints(options)
    weights = options.weights or (1.0,) * len(checkpoints)
    if len(checkpoints) < FEWEST_MERGED:
        raise InputError(f"one checkpoint is not an average; name {FEWEST_MERGED} or more, or a run with --last N")
    if len(weights) != len(checkpoints):
        raise InputError(f"--weights states {len(weights)}, but checkpoints are {len(checkpoints)}; state one for each")
    if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
        raise InputError(f"--weights: {wrong[0]:g} is not a finite number above 0; leave that checkpoint out")
    if options.output.exists():
        raise InputError(f"{options.output} already exists; name a folder that does not, or remove it")
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.convert.merge import merge_checkpoints

    show(merge_checkpoints(checkpoints, [weight / math.fsum(weights) for weight in weights], options.output))


def _find_checkpoints(options: MergeOptions) -> list[Path]:
    """Return the folders of the named checkpoints or, with --last, of the run's newest ones, the oldest first."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.checkpoint.run_folder import complete_checkpoints
    from megatron_fanformer.convert.recognition import checkpoint_of, find_checkpoint, recognize

    if options.last is None:
        return [find_checkpoint(on_this_machine(source)) for source in options.sources]
    if len(options.sources) > 1:
        raise InputError(
            f"--last takes checkpoints of one run, but {len(options.sources)} are named; name one run, or the "
            "checkpoints themselves"
        )
    run = recognize(options.sources[0], ("run",))
    latest = checkpoint_of(run)  # the run may have been set back to this one, so later ones are not its weights
    checkpoints = [folder for folder in complete_checkpoints(run.path) if folder.name <= latest.name]
    if not FEWEST_MERGED <= options.last <= len(checkpoints):
        raise InputError(
            f"--last is {options.last}; it must be at least {FEWEST_MERGED}, and {run.path} has {len(checkpoints)} up "
            "to its latest; have a run keep more by checkpoint.keep"
        )
    return checkpoints[-options.last :]


MERGE = Verb(
    name="merge",
    help="Average the weights of checkpoints, such as a run's last ones.",
    options=MergeOptions,
    run="megatron_fanformer.convert.verb:merge",
    examples=(
        "merge runs/demo/run --last 2 --output runs/demo/merged",
        "merge runs/decay-a runs/decay-b --weights 2 1\n--output runs/merged",
    ),
    removed={"--dtype": "round the average by convert --to megatron --dtype"},
)
