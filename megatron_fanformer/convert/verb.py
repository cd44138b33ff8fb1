"""The verbs `convert` and `merge`, and their options; imports nothing that is slow."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.options import Verb, argument, option, path_or_none
from megatron_fanformer.runtime import device
from megatron_fanformer.stores import is_url
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
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """Configuration file with fields of model that a Megatron-LM checkpoint does not state."""
    tokenizer: Path | None = option(None, parse=path_or_none)
    """Tokenizer to put beside the weights, where the source has none."""
    eod_id: int | None = None
    """The id that ends a document (default: the source's, or the end of text of --tokenizer)"""
    dtype: Literal["fp32", "bf16"] | None = None
    """Number format of the written weights (default: the source's own)"""
    padded_vocab_size: int | None = option(None, metavar="N")
    """Rows of the embedding (default: the source's own; for hf the token ids alone)"""
    max_shard_size: str = option("5GB", metavar="SIZE")
    """The largest file of a Hugging Face folder's weights."""
    verified: bool = option(True, name="--no-verify")
    """Verify the result before it is published."""
    receipt: Path | None = option(None, name="--report", metavar="FILE")
    """Write the receipt as JSON, with the files' hashes."""


def convert(options: ConvertOptions) -> None:
    """Run `convert`."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import MODELS, recognise

    source = on_this_machine(options.source)
    recognise(source, MODELS)  # anything else is reported before torch is imported
    if problems := file_problems(report=options.receipt):
        raise InputError("\n".join(problems))
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.convert.convert import convert_checkpoint

    arguments: dict[str, Any] = {**vars(options), "source": Path(source)}
    done = convert_checkpoint(**arguments)
    show([f"wrote {options.destination}", *done.lines()])


CONVERT = Verb(
    name="convert",
    help="Convert between our checkpoints, Hugging Face and the reference.",
    options=ConvertOptions,
    run="megatron_fanformer.convert.verb:convert",
    examples=(
        "convert runs/demo/run exported-folder --to hf",
        "convert FANformer-1B runs/released --to megatron\n--tokenizer tokenizer.json",
    ),
    results_are_files=True,
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
    dtype: Literal["fp32", "bf16"] | None = None
    """Number format of the averaged weights (default: the sources' own; fp32 of runs in bf16 with main weights)"""

    def shares(self, count: int) -> list[float]:
        """Return the share of each of `count` checkpoints in the average.

        Raises:
            InputError: there are too few checkpoints, or the weights are not one above 0 for each.
        """
        if count < FEWEST_MERGED:
            raise InputError(f"one checkpoint is not an average; name {FEWEST_MERGED} or more, or a run with --last N")
        weights = self.weights or (1.0,) * count
        if len(weights) != count:
            raise InputError(f"--weights states {len(weights)}, but there are {count} checkpoints; state one for each")
        if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
            raise InputError(f"--weights: {wrong[0]:g} is not a finite number above 0; leave that checkpoint out")
        parts = [weight / max(weights) for weight in weights]  # whose sum does not overflow
        whole = math.fsum(parts)
        return [part / whole for part in parts]


def merge(options: MergeOptions) -> None:
    """Run `merge`."""
    sources = _checkpoints(options)
    shares = options.shares(len(sources))
    if options.output.exists():
        raise InputError(f"{options.output} already exists; name a folder that does not, or remove it")
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.convert.merge import merge_checkpoints

    show(merge_checkpoints(sources, shares, options.output, options.dtype))


def _checkpoints(options: MergeOptions) -> list[tuple[Path, str]]:
    """Return the paths of the checkpoints to average, each with its absolute path or URL (without credentials)."""
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.checkpoint.run_folder import CHECKPOINTS, complete_checkpoints
    from megatron_fanformer.convert.recognition import checkpoint_of, find_checkpoint, recognise

    def origin(source: str, path: Path) -> str:
        if not is_url(source):
            return str(path.absolute())
        url = redacted(source).rstrip("/")
        if url.endswith(f"/{path.name}"):
            return url
        return f"{url.removesuffix(f'/{CHECKPOINTS}')}/{CHECKPOINTS}/{path.name}"

    if options.last is None:
        paths = [find_checkpoint(on_this_machine(source)) for source in options.sources]
        return [(path, origin(source, path)) for source, path in zip(options.sources, paths, strict=True)]
    source, *others = options.sources
    if others:
        raise InputError(
            f"--last is of one run, but {len(options.sources)} are named; name one, or the checkpoints themselves"
        )
    if is_url(source):
        raise InputError(f"--last is of a run on this machine, and {redacted(source)} is not; name its checkpoints")
    if options.last < FEWEST_MERGED:
        raise InputError(f"--last is {options.last}, and must be at least {FEWEST_MERGED}; raise it")
    run = recognise(source, ("run",))
    latest = checkpoint_of(run)  # later ones belong to a run that was rewound
    paths = [folder for folder in complete_checkpoints(run.path) if folder.name <= latest.name]
    if len(paths) < options.last:
        raise InputError(
            f"--last is {options.last}, but {run.path} has {len(paths)} up to its latest; lower it, or have the run "
            "keep more (checkpoint.keep)"
        )
    return [(path, origin(source, path)) for path in paths[-options.last :]]


MERGE = Verb(
    name="merge",
    help="Average the weights of checkpoints, such as a run's last ones.",
    options=MergeOptions,
    run="megatron_fanformer.convert.verb:merge",
    examples=(
        "merge runs/demo/run --last 2 --output runs/demo/merged",
        "merge runs/decay-a runs/decay-b --weights 2 1\n--output runs/merged",
    ),
    results_are_files=True,
)
