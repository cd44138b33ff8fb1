"""`convert`: from any kind of checkpoint to any other, through whole tensors under our global names."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.full_tensors import read_full_tensors, write_full_tensors
from megatron_fanformer.conversion.files import new_folder
from megatron_fanformer.conversion.huggingface import export_huggingface, is_huggingface_folder, read_huggingface
from megatron_fanformer.conversion.mapping import hf_to_megatron, megatron_to_reference, reference_to_megatron
from megatron_fanformer.conversion.reference import is_reference_folder, read_reference, write_reference
from megatron_fanformer.data.tokenizer import load_tokenizer, tokenizer_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import DTYPES, FANformerConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed

Kind = Literal["megatron", "hf", "reference"]


class Checkpoint(NamedTuple):
    """A model out of a checkpoint of any kind: whole tensors under our global names, on the CPU."""

    config: FANformerConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Path | None
    eod_id: int | None = None

    @property
    def end_of_text_id(self) -> int | None:
        """What ends a document: the id that was stated, or the tokenizer's own."""
        return load_tokenizer(self.tokenizer, eod_id=self.eod_id).eod_id if self.tokenizer else self.eod_id


def convert_checkpoint(
    source: Path,
    destination: Path,
    *,
    to: Kind,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    dtype: str | None = None,
) -> None:
    """Convert `source`, whose kind is recognised, into a new folder `destination`.

    Args:
        tokenizer: a file to put beside the weights; None: the source's own, if it has one.
        eod_id: the id that ends a document; None: the tokenizer's own.
        dtype: `fp32` or `bf16`; None: the source's own.

    Raises:
        InputError: the source is no checkpoint, the destination exists, or the tokenizer is missing.
        CorruptError: the source is damaged.
    """
    if destination.exists():
        raise InputError(f"{destination} exists; name a folder that does not, or remove it")
    if tokenizer is not None:
        tokenizer = tokenizer_file(tokenizer)
    with distributed(ParallelConfig(device="cpu")):  # megatron-core's reader and writer ask for a process group
        checkpoint = read_checkpoint(source)._replace(eod_id=eod_id)
        if tokenizer is not None:
            checkpoint = checkpoint._replace(tokenizer=tokenizer)
        if dtype is not None:
            tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in checkpoint.tensors.items()}
            checkpoint = checkpoint._replace(tensors=tensors)
        WRITERS[to](checkpoint, destination)


def read_checkpoint(source: Path) -> Checkpoint:
    """Read a checkpoint of any kind; needs a process group.

    Raises:
        InputError: it is none.
    """
    if is_huggingface_folder(source):
        config, tensors = read_huggingface(source)
        return Checkpoint(config, hf_to_megatron(tensors, config), store.attached_tokenizer(source))
    if is_reference_folder(source):
        config, tensors = read_reference(source)
        return Checkpoint(config, reference_to_megatron(tensors, config), store.attached_tokenizer(source))
    found = store.find_checkpoint(source)
    if store.saved_model(found).fan.placement == "qk_and_v":
        raise InputError(
            f"{found} is of placement qk_and_v, which convert does not know yet; train on and generate from it as it is"
        )
    return Checkpoint(store.saved_model(found), read_full_tensors(found), store.attached_tokenizer(found))


def _write_megatron(checkpoint: Checkpoint, destination: Path) -> None:
    saved = {"model": dataclasses.asdict(checkpoint.config)}
    attachments = [checkpoint.tokenizer] if checkpoint.tokenizer else []
    with new_folder(destination) as folder:
        write_full_tensors(folder, checkpoint.tensors, saved, attachments)


def _write_huggingface(checkpoint: Checkpoint, destination: Path) -> None:
    export_huggingface(
        checkpoint.config,
        checkpoint.tensors,
        destination,
        dtype=next(iter(checkpoint.tensors.values())).dtype,
        tokenizer_path=checkpoint.tokenizer,
        end_of_text_id=checkpoint.end_of_text_id,
    )


def _write_reference(checkpoint: Checkpoint, destination: Path) -> None:
    tensors = megatron_to_reference(checkpoint.tensors, checkpoint.config)
    write_reference(destination, checkpoint.config, tensors, end_of_text_id=checkpoint.end_of_text_id)


WRITERS: dict[str, Callable[[Checkpoint, Path], Any]] = {
    "megatron": _write_megatron,
    "hf": _write_huggingface,
    "reference": _write_reference,
}
