"""`merge`: the weighted average of checkpoints of one model, one tensor at a time, with a receipt.

A weight of a run in bf16 counts as its float32 main weight. Sums are float64 and rounded once, to the format written:
an average is the exact one to half a unit in its last place (but for float64's own 1e-16), and the average of a
checkpoint with itself is that checkpoint, bit for bit.
"""

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from isal import isal_zlib
from torch import Tensor

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, open_full_tensors
from megatron_fanformer.checkpoint.manifest import MANIFEST
from megatron_fanformer.checkpoint.versions import versions
from megatron_fanformer.data.chat_template import CHAT_TEMPLATE_JINJA, own_template
from megatron_fanformer.durable_files import new_folder, sha256_of
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.formats.checkpoints import blaming_removal, open_checkpoint, write_checkpoint
from megatron_fanformer.formats.convert import lock_of_run
from megatron_fanformer.formats.model_card import RECEIPT, Extras
from megatron_fanformer.formats.name_table import check_tensors, listed
from megatron_fanformer.formats.verb import Averaged
from megatron_fanformer.formats.verify.receipt import side
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.terminal import table


class _Source(NamedTuple):
    """A checkpoint that enters the average."""

    path: Path
    origin: str
    share: float
    tensors: LazyTensors
    """Weights under their global names: the main weights, where there are any."""

    @property
    def number_format(self) -> str:
        """The types that its weights are read in."""
        return " and ".join(sorted({_name(tensor.dtype) for tensor in self.tensors.meta.values()}))


def merge_checkpoints(
    averaged: Sequence[Averaged], shares: Sequence[float], output: Path, dtype: str | None = None
) -> list[str]:
    """Write the average of checkpoints into a new folder, as its checkpoint of step 0; returns lines about it.

    Args:
        shares: what part of the average each is; their sum is 1.
        dtype: number format of the average, by its name in `DTYPES`; None: the narrowest that holds the sources'.

    Raises:
        InputError: they are of different models, tokenizers or chat templates, the folder exists, or a checkpoint was
            removed meanwhile; there is no new folder then.
        CorruptError: one is damaged, or what was written is not what was computed; there is no folder then.
    """
    with blaming_removal([each.path for each in averaged]):
        return _merge(averaged, shares, output, dtype)


def _merge(averaged: Sequence[Averaged], shares: Sequence[float], output: Path, dtype: str | None) -> list[str]:
    checkpoints = [each.path for each in averaged]
    for checkpoint in checkpoints:
        store.check_sound(checkpoint)  # a damaged tokenizer is damaged, rather than another one
    _check_models(checkpoints)
    model = store.saved_model(checkpoints[0])
    tokenizer = _same_file("tokenizer", {each: store.attached_tokenizer(each) for each in checkpoints})
    template = _same_file("chat template", {each: _template(each) for each in checkpoints})
    sources = [
        _Source(*each, share, open_full_tensors(each.path, main=True))
        for each, share in zip(averaged, shares, strict=True)
    ]
    for source in sources:
        check_tensors(source.tensors.meta, model, "megatron")
    stored = {tensor.dtype for source in sources for tensor in source.tensors.meta.values()}
    number_format = DTYPES[dtype] if dtype else reduce(torch.promote_types, stored)
    extras = Extras(
        name=output.name, tokenizer=tokenizer, chat_template=own_template(template.parent) if template else None
    )
    sums: dict[str, int] = {}

    def average(name: str) -> Tensor:
        averaged = _average(((source.tensors[name], source.share) for source in sources), number_format)
        sums[name] = _crc32(averaged)
        return averaged

    meta = {name: tensor.to(number_format) for name, tensor in sources[0].tensors.meta.items()}
    with lock_of_run(output), new_folder(output) as folder:
        write_checkpoint("megatron", folder, model, LazyTensors(meta, average), extras)
        written = open_checkpoint(folder)
        if wrong := [name for name in meta if sums[name] != _crc32(written.tensors[name])]:
            raise CorruptError(f"the average was not written as computed, and is left out: {listed(wrong)}; try again")
        receipt = {
            "sources": [
                {
                    "path": source.origin,
                    "step": store.step_of(source.path),
                    "weight": source.share,
                    "read_in": source.number_format,
                    "manifest_sha256": sha256_of(file) if (file := source.path / MANIFEST).is_file() else None,
                }
                for source in sources
            ],
            "summed_in": "float64",
            "crc32": {name: f"{value:08x}" for name, value in sums.items()},
            "destination": side(written, output, hashed=True),
            "versions": versions(),
        }
        (folder / RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n")
    rows = [(source.origin, f"{source.share:.4g}", source.number_format) for source in sources]
    return [
        f"wrote {output}",
        *table(("averaged", "weight", "read in"), rows, align="lrl"),
        f"{len(meta)} tensors, summed in float64, written as {_name(number_format)} and read back; {RECEIPT} has sums",
        "left out: the optimizer's state; training on the average starts with a fresh one",
    ]


def _average(parts: Iterable[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
    """Return the sum of tensors times their shares; each is requested when its turn comes, and then dropped."""
    total: Tensor | None = None
    for tensor, share in parts:
        # not onto zeros, where a negative zero would lose its sign
        total = tensor.double().mul_(share) if total is None else total.add_(tensor, alpha=share)
        del tensor
    assert total is not None, "an average of nothing"
    return total.to(dtype)


def _crc32(tensor: Tensor) -> int:
    return isal_zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- whether they can be averaged


def _check_models(checkpoints: Sequence[Path]) -> None:
    first = store.saved_model(checkpoints[0]).resolved_fields()
    for checkpoint in checkpoints[1:]:
        other = store.saved_model(checkpoint).resolved_fields()
        if found := [f"{name} {first[name]} and {other[name]}" for name in first if first[name] != other[name]]:
            raise InputError(
                f"{checkpoints[0]} and {checkpoint} are of different models ({', '.join(found)}); name checkpoints of "
                "one model"
            )


def _template(checkpoint: Path) -> Path | None:
    return file if (file := checkpoint / CHAT_TEMPLATE_JINJA).is_file() else None


def _same_file(kind: str, files: dict[Path, Path | None]) -> Path | None:
    """Return the file of a kind that the checkpoints have; None where none has one.

    Raises:
        InputError: two have different ones.
    """
    there = [file for file in files.values() if file is not None]
    for file in there[1:]:
        if file.read_bytes() != there[0].read_bytes():
            raise InputError(
                f"{there[0]} and {file} are different {kind}s, whose checkpoints have no common average; name "
                "checkpoints that were trained with one"
            )
    return there[0] if there else None
