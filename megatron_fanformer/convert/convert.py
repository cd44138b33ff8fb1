"""`convert`: any kind of checkpoint into any other, one tensor at a time, with a receipt."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import LazyTensors
from megatron_fanformer.convert.checkpoints import (
    Checkpoint,
    lock_of_run,
    open_checkpoint,
    removed_means_input_error,
    write_checkpoint,
)
from megatron_fanformer.convert.huggingface import MODEL_CARD
from megatron_fanformer.convert.model_card import MAX_SHARD_SIZE, RECEIPT, Extras, receipt_section, training_record
from megatron_fanformer.convert.name_table import Format, convert, names_in, rows_of, vocabulary_multiple
from megatron_fanformer.convert.receipt import Json, check_lines, failures, report, verify, vocabulary
from megatron_fanformer.convert.reference import beyond_reference
from megatron_fanformer.convert.tokenizer_files import adds_special_tokens, check_fits
from megatron_fanformer.convert.weight_files import shard_bytes
from megatron_fanformer.data.chat_template import template_of
from megatron_fanformer.data.tokenizer import load_tokenizer, note_of_end, tokenizer_file
from megatron_fanformer.durable_files import new_folder, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig, torch_dtype
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed


class Conversion(NamedTuple):
    """The result of a conversion."""

    checks: Json | None
    """Results of the checks by name; None without verification."""
    notes: list[str]
    """One-line notes, such as on parts that were left out."""

    def lines(self) -> Iterator[str]:
        """Return the lines for a terminal."""
        yield from ["not verified"] if self.checks is None else check_lines(self.checks)
        yield from self.notes


def convert_checkpoint(
    source: Path,
    destination: Path,
    *,
    to: Format,
    config: Path | None = None,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    dtype: str | None = None,
    padded_vocab_size: int | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    verified: bool = True,
    receipt: Path | None = None,
) -> Conversion:
    """Convert a source, whose kind is recognised, into a new folder, which appears once it is verified.

    The other arguments are the fields of `ConvertOptions`. A stated tokenizer brings the chat template beside it;
    without either, the source's stays.

    Raises:
        InputError: the source is not a checkpoint, the destination exists, the tokenizer is missing, unreadable or
            does not fit, a size or the end-of-text id is invalid, or the source was removed meanwhile.
        CorruptError: the source is damaged, or a check failed; there is no destination then. The report is written.
    """
    if destination.exists():
        raise InputError(f"{destination} already exists; name a folder that does not, or remove it")
    shard_bytes(max_shard_size)  # refused before anything is read
    opened = open_checkpoint(source, config)
    if to == "reference" and (foreign := beyond_reference(opened.config)):
        raise InputError(
            f"the model in {source} has {foreign}, which the authors' format has not; convert it to hf or megatron"
        )
    goal = _with_vocabulary(opened.config, to, padded_vocab_size)
    extras = _extras(opened, goal, to, destination.name, tokenizer=tokenizer, eod_id=eod_id)
    extras = dataclasses.replace(extras, max_shard_size=max_shard_size)
    used: set[str] = set()

    def load(name: str) -> Tensor:
        used.add(name)
        return opened.tensors[name]

    tensors = LazyTensors(opened.tensors.meta, load)
    rounded_to = torch_dtype(dtype) if dtype else None
    converted = convert(tensors, opened.config, opened.format, to, target_config=goal, dtype=rounded_to)
    if dtype is None:
        _check_formats(opened)
    with removed_means_input_error([opened.path]), lock_of_run(destination), new_folder(destination) as folder:
        write_checkpoint(to, folder, goal, converted, extras)
        written = open_checkpoint(folder)
        checks: Json | None = None
        if verified:  # megatron-core's model needs process groups
            with distributed(ParallelConfig(), runtime=RuntimeConfig(device="cpu")) as grid:
                checks = verify(opened, used, written, grid)
        rows = vocabulary(opened, written)
        content = report(opened, written, checks, rows, destination, hashed=receipt is not None)
        if receipt is not None:
            _write_json(receipt, content)
        if checks and (failed := failures(checks)):
            raise CorruptError(
                f"the conversion of {source} failed its checks and is not published: {failed}; keep the source, and "
                "report this"
            )
        if to == "hf":
            _add_receipt(folder, content if verified else None)
    return Conversion(checks, list(_notes(opened, rows, to, extras)))


def _extras(
    source: Checkpoint, goal: FANformerConfig, to: Format, name: str, *, tokenizer: Path | None, eod_id: int | None
) -> Extras:
    """Return the files and facts that go beside the tensors.

    Raises:
        InputError: the tokenizer is missing, unreadable or does not fit, or the end-of-text id has no effect or is
            outside the vocabulary.
    """
    if to == "megatron" and (tokenizer or source.tokenizer) is None and eod_id is not None:
        raise InputError(
            f"--eod-id {eod_id} has no effect with --to megatron and no tokenizer to keep it beside; name one by "
            "--tokenizer, or leave it out"
        )
    stated_tokenizer = tokenizer_file(tokenizer) if tokenizer else None
    end_id = source.end_of_text_id if eod_id is None and tokenizer is None else eod_id
    if end_id is not None and not 0 <= end_id < goal.vocab_size:
        named = f"the end-of-text id of {source.path} is {end_id}, which" if eod_id is None else f"--eod-id {end_id}"
        raise InputError(f"{named} is outside the model's vocabulary; state one of [0, {goal.vocab_size}) by --eod-id")
    if stated_tokenizer:
        size = load_tokenizer(stated_tokenizer, eod_id=end_id, needs_eod=to != "megatron").vocab_size
        check_fits(stated_tokenizer, size, goal.vocab_size)
    return Extras(
        name=name,
        tokenizer=stated_tokenizer or source.tokenizer,
        chat_template=None if to == "reference" else _chat_template(stated_tokenizer, source),
        eod_id=end_id,
        training=training_record(source.format, source.path, source.run) if to == "hf" else "",
    )


def _chat_template(tokenizer: Path | None, source: Checkpoint) -> str | None:
    """Return the template beside a stated tokenizer, or else the source's, with the special tokens that it uses."""
    if tokenizer is not None and (template := template_of(tokenizer.parent, tokenizer)) is not None:
        return template
    beside = source.tokenizer or tokenizer
    return None if beside is None else template_of(source.path, beside)


def _check_formats(source: Checkpoint) -> None:
    """Raise InputError if tensors that become one in Megatron have different number formats."""
    for row, layer in rows_of(source.config):
        types = {name: source.tensors.meta[name].dtype for name in names_in(row, layer, source.format)}
        if len({*types.values()}) > 1:
            named = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in types.items())
            raise InputError(
                f"the model in {source.path} has parts of one tensor in different number formats: {named}; state one "
                "by --dtype"
            )


def _add_receipt(folder: Path, content: Json | None) -> None:
    """Write the receipt into an export, and a section on it into the model card; None: there is no receipt."""
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
    """Return the model with `rows` rows in its embedding: padding, or token ids where the format has no padding."""
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


def _notes(source: Checkpoint, rows: Json, to: Format, extras: Extras) -> Iterator[str]:
    yield from source.notes
    if source.not_converted:
        yield (
            f"not converted: {', '.join(source.not_converted)} (the optimizer's state; training on the converted "
            "weights starts with a fresh one)"
        )
    if rows["dropped_rows"] and "not zero" in rows["dropped_rows_were"].values():
        yield f"left out: {rows['dropped_rows']} rows of vocabulary padding that were not zero; no token id needs them"
    if to != "reference" and extras.tokenizer is not None:
        yield from note_of_end(load_tokenizer(extras.tokenizer, eod_id=extras.eod_id, needs_eod=False))
    if to == "hf" and extras.tokenizer and adds_special_tokens(extras.tokenizer):
        yield (
            "left out: the special tokens that the tokenizer puts around a text; preparation and generation add none"
        )
