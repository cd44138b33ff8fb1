"""Checkpoints of any format: opens one without reading weights, and writes one from tensors of its format."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of, open_full_tensors, write_full_tensors
from megatron_fanformer.checkpoint.stored_files import SavedProgress
from megatron_fanformer.convert import huggingface, reference
from megatron_fanformer.convert.megatron_lm import LEFT_OUT, open_megatron_lm
from megatron_fanformer.convert.model_card import Extras
from megatron_fanformer.convert.name_table import Format
from megatron_fanformer.convert.recognition import DESCRIPTIONS, MODELS, checkpoint_of, recognize
from megatron_fanformer.convert.weight_files import weight_files
from megatron_fanformer.data.chat_template import CHAT_TEMPLATE_JINJA, attached_files
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig, torch_dtype


class Checkpoint(NamedTuple):
    """A model in a folder; its tensors are read on request."""

    format: Format
    path: Path  # the folder of the checkpoint or the export itself, not of its run
    config: FANformerConfig
    tensors: LazyTensors  # under the format's own names
    tokenizer: Path | None  # the tokenizer's file; None if the folder has none
    notes: tuple[str, ...] = ()  # on the conversion, for the user; one line each
    # Progress of a run of Megatron-LM, if its arguments state it. Our checkpoints have theirs in a file.
    progress: SavedProgress | None = None
    # The id that ends a text, if the model's configuration states one. In our checkpoints only the tokenizer states it.
    end_of_text_id: int | None = None

    def weight_files(self) -> list[Path]:
        """Return the files that hold the tensors."""
        return sorted(self.path.glob("*.distcp")) if self.format == "megatron" else weight_files(self.path)


def open_checkpoint(source: Path, config: Path | None = None) -> Checkpoint:
    """Recognize the kind of a checkpoint, and read everything but its tensors.

    Args:
        config: a configuration file whose section `model` has the fields that a checkpoint of Megatron-LM lacks.

    Raises:
        InputError: the path holds no model, or this package cannot build the model.
        CorruptError: the checkpoint is damaged, or a file holds code where only data belong.
    """
    target = recognize(source, MODELS)
    folder = checkpoint_of(target)
    tokenizer = run_folder.attached_tokenizer(folder)
    if target.kind == "megatron-lm":
        model, tensors, notes, progress = open_megatron_lm(folder, config)
        return Checkpoint("megatron", folder, model, tensors, tokenizer, notes, progress)
    if config is not None:
        raise InputError(
            f"--config states fields that {DESCRIPTIONS['megatron-lm']} lacks, but {source} is "
            f"{DESCRIPTIONS[target.kind]}; leave it out"
        )
    if target.kind == "hf":
        _, _, end_id = huggingface.stated_model(folder)
        return Checkpoint("hf", folder, *huggingface.open_huggingface(folder), tokenizer, end_of_text_id=end_id)
    if target.kind == "reference":
        model, tensors = reference.open_reference(folder)
        left_out = [name for name in reference.OPTIMIZER_FILES if (folder / name).exists()]
        notes = (f"{LEFT_OUT} ({', '.join(left_out)})",) if left_out else ()
        end_id = reference.stated_end_of_text_id(folder)
        return Checkpoint("reference", folder, model, tensors, tokenizer, notes, end_of_text_id=end_id)
    return Checkpoint("megatron", folder, run_folder.saved_model(folder), open_full_tensors(folder), tokenizer)


def write_checkpoint(
    format: Format, folder: Path, config: FANformerConfig, tensors: LazyTensors, extras: Extras
) -> None:
    """Write a model into an empty folder, requesting one tensor after the other.

    Raises:
        InputError: the tokenizer does not fit the model, or the shard size is invalid.
    """
    if format == "hf":
        huggingface.write_huggingface(folder, config, tensors, extras)
        return
    if format == "reference":
        reference.write_reference(folder, config, tensors, extras.end_of_text_id)
        return
    sections: dict[str, Any] = {"model": dataclasses.asdict(config)}
    dtype = next(iter(meta_of(tensors).values())).dtype
    run_dtypes = {torch_dtype(name): name for name in ("fp32", "bf16")}
    if dtype in run_dtypes:  # a run cannot train in another type, so its configuration cannot name one
        sections["precision"] = {"dtype": run_dtypes[dtype]}
    template = extras.chat_template if extras.tokenizer else None
    if template is not None:
        (folder / CHAT_TEMPLATE_JINJA).write_text(template, encoding="utf-8")
    write_full_tensors(folder, tensors, sections, attached_files(extras.tokenizer, template, eod_id=extras.eod_id))
