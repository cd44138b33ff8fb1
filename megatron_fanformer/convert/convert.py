"""`convert`: from any kind of checkpoint to any other, one tensor at a time, with a receipt."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import LazyTensors
from megatron_fanformer.checkpoint.run_folder import CHECKPOINTS
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.convert.checkpoints import Checkpoint, blaming_removal, open_checkpoint, write_checkpoint
from megatron_fanformer.convert.huggingface import MODEL_CARD
from megatron_fanformer.convert.model_card import RECEIPT, Extras, receipt_section
from megatron_fanformer.convert.name_table import Format, convert, names_in, rows_of
from megatron_fanformer.convert.reference import beyond_reference
from megatron_fanformer.convert.tokenizer_files import adds_special_tokens, check_fits
from megatron_fanformer.convert.training_record import training_record
from megatron_fanformer.convert.transforms import vocabulary_multiple
from megatron_fanformer.convert.verb import ConvertOptions
from megatron_fanformer.convert.verify.receipt import Json, failures, report, seen, verify, vocabulary
from megatron_fanformer.convert.weight_files import shard_bytes
from megatron_fanformer.data.chat_template import template_of
from megatron_fanformer.data.tokenizer import load_tokenizer, note_of_end, tokenizer_file
from megatron_fanformer.durable_files import new_folder, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.runtime.config import RuntimeConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed


class Conversion(NamedTuple):
    """The result of a conversion."""

    checks: Json | None
    """Results of the checks by name; None where verification was off."""
    notes: list[str]
    """Notes, such as on parts left out, one line each."""

    def lines(self) -> Iterator[str]:
        """Return the lines for a terminal."""
        yield from ["not verified"] if self.checks is None else seen(self.checks)
        yield from self.notes


def convert_checkpoint(options: ConvertOptions) -> Conversion:
    """Convert a source, whose kind is recognised, into a new folder, which appears once it is verified.

    A stated tokenizer brings the chat template beside it; without either, the source's own stays.

    Raises:
        InputError: the source is not a checkpoint, the destination exists, the tokenizer is missing, unreadable or
            does not fit, a size or the end-of-text id is invalid, or the source was removed meanwhile.
        CorruptError: the source is damaged, or a check failed; there is no destination then. The report is written.
    """
    source, destination, to = Path(options.source), options.destination, options.to
    if destination.exists():
        raise InputError(f"{destination} already exists; name a folder that does not, or remove it")
    shard_bytes(options.max_shard_size)  # refused before anything is read
    opened = open_checkpoint(source, options.config)
    if to == "reference" and (foreign := beyond_reference(opened.config)):
        raise InputError(
            f"the model in {source} has {foreign}, which the authors' format has not; convert it to hf or megatron"
        )
    goal = _with_vocabulary(opened.config, to, options.padded_vocab_size)
    own = tokenizer_file(options.tokenizer) if options.tokenizer else None
    eod_id = _end_of_text_id(options, opened, goal)
    if own:
        loaded = load_tokenizer(own, eod_id=eod_id, needs_eod=to != "megatron")
        check_fits(own, loaded.vocab_size, goal.vocab_size)
    extras = Extras(
        name=destination.name,
        tokenizer=own or opened.tokenizer,
        chat_template=None if to == "reference" else _chat_template(own, opened),
        eod_id=eod_id,
        max_shard_size=options.max_shard_size,
        training=training_record(opened.format, opened.path, opened.run) if to == "hf" else "",
    )
    with blaming_removal([opened.path]), lock_of_run(destination), new_folder(destination) as folder:
        used = _write(options, folder, opened, goal, extras)
        written = open_checkpoint(folder)
        checks = _verified(opened, used, written) if options.verified else None
        rows = vocabulary(opened, written)
        content = report(opened, written, checks, rows, destination, hashed=options.receipt is not None)
        if options.receipt is not None:
            _write_json(options.receipt, content)
        if checks and (failed := failures(checks)):
            raise CorruptError(
                f"the conversion of {source} failed its checks and is not published: {failed}; keep the source, and "
                "report this"
            )
        if to == "hf":
            _add_receipt(folder, content if options.verified else None)
    return Conversion(checks, [*_notes(opened, rows), *_notes_of_tokenizer(to, extras)])


def lock_of_run(destination: Path) -> AbstractContextManager[object]:
    """Lock the run that a checkpoint is put into: while it goes on, it would remove the checkpoint, or resume it."""
    checkpoints = destination.absolute().parent
    return run_lock(checkpoints.parent) if checkpoints.name == CHECKPOINTS else nullcontext()


def _end_of_text_id(options: ConvertOptions, source: Checkpoint, goal: FANformerConfig) -> int | None:
    """Return the id that ends a text: as stated, or as the source has it; None: the tokenizer's own.

    Raises:
        InputError: it is outside the vocabulary, or has no place in the target.
    """
    stated = options.eod_id
    if options.to == "megatron" and (options.tokenizer or source.tokenizer) is None and stated is not None:
        raise InputError(
            f"--eod-id {stated} has no effect with --to megatron and no tokenizer to keep it beside; name one by "
            "--tokenizer, or leave it out"
        )
    end_id = source.end_of_text_id if stated is None and options.tokenizer is None else stated
    if end_id is not None and not 0 <= end_id < goal.vocab_size:
        named = f"the end-of-text id of {source.path} is {end_id}, which" if stated is None else f"--eod-id {end_id}"
        raise InputError(f"{named} is outside the model's vocabulary; state one of [0, {goal.vocab_size}) by --eod-id")
    return end_id


def _chat_template(stated: Path | None, source: Checkpoint) -> str | None:
    """Return the template beside a stated tokenizer, or else the source's, with the special tokens that it had there:
    what is written has not all of them.
    """
    if stated is not None and (template := template_of(stated.parent, stated)) is not None:
        return template
    tokenizer = source.tokenizer or stated
    return None if tokenizer is None else template_of(source.path, tokenizer)


def _write(
    options: ConvertOptions, folder: Path, source: Checkpoint, goal: FANformerConfig, extras: Extras
) -> set[str]:
    """Fill the folder with the converted source; return the names of the tensors it needed."""
    used: set[str] = set()

    def load(name: str) -> Tensor:
        used.add(name)
        return source.tensors[name]

    converted = convert(
        LazyTensors(source.tensors.meta, load),
        source.config,
        source.format,
        options.to,
        target_config=goal,
        dtype=DTYPES[options.dtype] if options.dtype else None,
    )
    if options.dtype is None:
        _check_formats(source)
    write_checkpoint(options.to, folder, goal, converted, extras)
    return used


def _check_formats(source: Checkpoint) -> None:
    """Raise InputError where tensors that are one in Megatron have several number formats: which should it have?"""
    for row, layer in rows_of(source.config):
        types = {name: source.tensors.meta[name].dtype for name in names_in(row, layer, source.format)}
        if len({*types.values()}) > 1:
            named = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in types.items())
            raise InputError(
                f"the model in {source.path} has parts of one tensor in different number formats: {named}; state one "
                "by --dtype"
            )


def _verified(source: Checkpoint, used: set[str], written: Checkpoint) -> Json:
    # megatron-core's model needs process groups
    with distributed(ParallelConfig(), runtime=RuntimeConfig(device="cpu")) as grid:
        return verify(source, used, written, grid)


def _add_receipt(folder: Path, content: Json | None) -> None:
    """Add the receipt, and a section on it in the model card, for later users of the folder; None: there is none."""
    with (folder / MODEL_CARD).open("a", encoding="utf-8") as card:
        card.write(receipt_section(content))
    if content is not None:
        sides = {
            side: {**content[side], "path": Path(content[side]["path"]).name} for side in ("source", "destination")
        }
        _write_json(folder / RECEIPT, {**content, **sides})  # the rest of the paths is private


def _write_json(path: Path, content: Json) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def _with_vocabulary(config: FANformerConfig, to: Format, rows: int | None) -> FANformerConfig:
    """Return the model with that many rows in its embedding: padding, or token ids where the format has no padding."""
    if rows is None:
        return config
    if rows < config.vocab_size:
        raise InputError(
            f"the padded vocabulary size is {rows}, but the model has {config.vocab_size} token ids; state that many "
            "or more"
        )
    vocab_size = rows if to == "hf" else config.vocab_size
    return dataclasses.replace(
        config, vocab_size=vocab_size, make_vocab_size_divisible_by=vocabulary_multiple(vocab_size, rows)
    )


def _notes(source: Checkpoint, rows: Json) -> list[str]:
    notes = [*source.notes]
    if source.not_converted:
        notes.append(
            f"not converted: {', '.join(source.not_converted)} (the optimizer's state; training on the converted "
            "weights starts with a fresh one)"
        )
    if rows["dropped_rows"] and "not zero" in rows["dropped_rows_were"].values():
        notes.append(
            f"left out: {rows['dropped_rows']} rows of vocabulary padding that were not zero; no token id needs them"
        )
    return notes


def _notes_of_tokenizer(to: Format, extras: Extras) -> Iterator[str]:
    if to != "reference" and extras.tokenizer is not None:
        yield from note_of_end(load_tokenizer(extras.tokenizer, eod_id=extras.eod_id, needs_eod=False))
    if to == "hf" and extras.tokenizer and adds_special_tokens(extras.tokenizer):
        yield (
            "left out: the special tokens that the tokenizer puts around a text; preparation and generation add none"
        )
