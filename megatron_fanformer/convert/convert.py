"""`convert`: turns a checkpoint of any kind into any other kind, one tensor at a time, and writes a receipt."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_fanformer.checkpoint.stored_files import read_table, saved_progress
from megatron_fanformer.convert.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from megatron_fanformer.convert.model_card import MAX_SHARD_SIZE, RECEIPT, Extras
from megatron_fanformer.convert.name_table import Format, convert
from megatron_fanformer.convert.receipt import receipt, verify
from megatron_fanformer.convert.reference import unsupported_part
from megatron_fanformer.convert.tokenizer_files import adds_special_tokens, check_fits
from megatron_fanformer.data.chat_template import read_standalone_template
from megatron_fanformer.data.tokenizer import end_of_text_notices, load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import new_folder
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed


def convert_checkpoint(
    source: Path,
    destination: Path,
    *,
    to: Format,
    config: Path | None = None,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    verified: bool = True,
) -> list[str]:
    """Convert a checkpoint of any kind into a new folder, which appears only after verification.

    The keyword arguments are the fields of `ConvertOptions`. A chat template beside `tokenizer` replaces the source's.
    Returns lines for a terminal.

    Raises:
        InputError: the source is not a checkpoint, the destination exists, the tokenizer is missing, unreadable or
            does not fit the model, or a size or the end-of-text id is invalid.
        CorruptError: the source is damaged, or a check failed; then there is no destination.
    """
    if destination.exists():
        raise InputError(f"{destination} already exists; name a folder that does not, or remove it")
    opened = open_checkpoint(source, config)
    if to == "reference" and (unsupported := unsupported_part(opened.config)):
        raise InputError(
            f"the model in {source} has {unsupported}, which the authors' format cannot express; convert it to hf or "
            "megatron"
        )
    extras = _collect_extras(opened, to, destination.name, tokenizer, eod_id, max_shard_size)
    rounded_to = torch_dtype(dtype) if dtype else None
    converted = convert(opened.tensors, opened.config, opened.format, to, dtype=rounded_to)
    lines = ["not verified"]
    with new_folder(destination) as folder:
        write_checkpoint(to, folder, opened.config, converted, extras)
        if verified:
            written = open_checkpoint(folder)
            with distributed(ParallelConfig(), runtime=RuntimeConfig(device="cpu")) as grid:
                checks = verify(opened, written, rounded_to, grid)
            if checks["problem"]:
                raise CorruptError(
                    f"the conversion of {source} failed its checks and is not published: {checks['problem']}; keep "
                    "the source, and report this"
                )
            content = receipt(opened, written, checks, destination)
            (folder / RECEIPT).write_text(json.dumps(content, indent=1) + "\n")
            lines = [
                f"verified: {len(opened.tensors)} tensors, converted back, are the source's {checks['round_trip']}; "
                f"logits differ by {checks['logits_max_abs_error']:.1e} at most ({checks['logits_allowed']:.1e} is "
                "allowed)"
            ]
    return [*lines, *_notes(opened, to, extras)]


def _collect_extras(
    source: Checkpoint, to: Format, name: str, tokenizer: Path | None, eod_id: int | None, max_shard_size: str
) -> Extras:
    """Return the files and facts that go beside the tensors: as the user stated them, or else the source's."""
    vocab_size = source.config.vocab_size
    if to == "megatron" and (tokenizer or source.tokenizer) is None and eod_id is not None:
        raise InputError(
            f"--eod-id {eod_id} has no effect with --to megatron and no tokenizer to keep it beside; name one by "
            "--tokenizer, or leave it out"
        )
    stated_tokenizer = tokenizer_file(tokenizer) if tokenizer else None
    end_id = source.end_of_text_id if eod_id is None and tokenizer is None else eod_id  # None: the tokenizer's own
    if end_id is not None and not 0 <= end_id < vocab_size:
        subject = f"the end-of-text id of {source.path} is {end_id}, which" if eod_id is None else f"--eod-id {end_id}"
        raise InputError(f"{subject} is outside the model's vocabulary; state one of [0, {vocab_size}) by --eod-id")
    if stated_tokenizer:
        size = load_tokenizer(stated_tokenizer, eod_id=end_id, needs_eod=to != "megatron").vocab_size
        check_fits(stated_tokenizer, size, vocab_size)
    progress = source.progress
    if progress is None and source.format == "megatron":
        progress = saved_progress(source.path, read_table(source.path))
    return Extras(
        name=name,
        tokenizer=stated_tokenizer or source.tokenizer,
        chat_template=None if to == "reference" else _chat_template(stated_tokenizer, source),
        eod_id=end_id,
        progress=progress,
        max_shard_size=max_shard_size,
    )


def _chat_template(tokenizer: Path | None, source: Checkpoint) -> str | None:
    """Return the chat template beside the stated tokenizer, or else the source's; None if neither has one.

    The returned template begins with statements that set the special tokens which it uses.
    """
    template = None if tokenizer is None else read_standalone_template(tokenizer.parent, tokenizer)
    special_tokens_from = source.tokenizer or tokenizer
    if template is None and special_tokens_from is not None:
        template = read_standalone_template(source.path, special_tokens_from)
    return template


def _notes(source: Checkpoint, to: Format, extras: Extras) -> Iterator[str]:
    """Yield lines about parts of the source that the conversion leaves out, and about the tokenizer."""
    yield from source.notes
    if to != "reference" and extras.tokenizer is not None:
        yield from end_of_text_notices(load_tokenizer(extras.tokenizer, eod_id=extras.eod_id, needs_eod=False))
    if to == "hf" and extras.tokenizer and adds_special_tokens(extras.tokenizer):
        yield (
            "left out: the special tokens that the tokenizer puts around a text; preparation and generation add none"
        )
