"""`merge`: the weighted average of checkpoints of one model, one tensor at a time, with a receipt.

Of a run in bf16, the float32 main weights are averaged. Sums are computed in float64 and rounded once, to the number
format of the file: an average is exact to half a unit in its last place (apart from float64's relative 1e-16), and the
average of a checkpoint with itself is that checkpoint, bit for bit.
"""

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, open_full_tensors
from megatron_fanformer.checkpoint.manifest import MANIFEST, versions
from megatron_fanformer.convert.checkpoints import open_checkpoint, write_checkpoint
from megatron_fanformer.convert.model_card import RECEIPT, Extras
from megatron_fanformer.convert.name_table import check_tensors
from megatron_fanformer.convert.receipt import describe_checkpoint
from megatron_fanformer.data.chat_template import CHAT_TEMPLATE_JINJA, read_template
from megatron_fanformer.durable_files import new_folder, sha256_of
from megatron_fanformer.errors import InputError


def merge_checkpoints(sources: Sequence[Path], shares: Sequence[float], output: Path) -> list[str]:
    """Write the average of checkpoints into a new folder, as its checkpoint of step 0; return lines about it.

    The average has the narrowest number format that holds every value of all sources' formats.

    Args:
        shares: the weight of each checkpoint; their sum is 1.

    Raises:
        InputError: the checkpoints differ in model, tokenizer or chat template, or the output folder exists.
        CorruptError: a checkpoint is damaged; then no folder is written.
    """
    for source in sources:
        run_folder.check_sound(source)  # first, or a damaged tokenizer would be reported as a different tokenizer
    _refuse_different_models(sources)
    model = run_folder.saved_model(sources[0])
    tokenizer = _same_file("tokenizer", map(run_folder.attached_tokenizer, sources))
    template = _same_file("chat template", (source / CHAT_TEMPLATE_JINJA for source in sources))
    opened = [open_full_tensors(source, main=True) for source in sources]
    for tensors in opened:
        check_tensors(tensors.meta, model, "megatron")
    dtype = reduce(torch.promote_types, (tensor.dtype for tensors in opened for tensor in tensors.meta.values()))
    extras = Extras(
        name=output.name, tokenizer=tokenizer, chat_template=read_template(template.parent) if template else None
    )

    def read_average(name: str) -> Tensor:
        return _average(((tensors[name], share) for tensors, share in zip(opened, shares, strict=True)), dtype)

    meta = {name: tensor.to(dtype) for name, tensor in opened[0].meta.items()}
    manifests = [source / MANIFEST for source in sources]
    with new_folder(output) as folder:
        write_checkpoint("megatron", folder, model, LazyTensors(meta, read_average), extras)
        receipt = {
            "sources": [
                {
                    "path": str(source.absolute()),
                    "step": run_folder.step_of(source),
                    "weight": share,
                    "manifest_sha256": sha256_of(manifest) if manifest.is_file() else None,
                }
                for source, share, manifest in zip(sources, shares, manifests, strict=True)
            ],
            "destination": describe_checkpoint(open_checkpoint(folder), output),
            "versions": versions(),
        }
        (folder / RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n")
    return [
        f"wrote {output}",
        *(f"averaged: {source} (weight {share:.4g})" for source, share in zip(sources, shares, strict=True)),
        "left out: the optimizer's state; training on the average starts with a fresh one",
    ]


def _average(parts: Iterable[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
    """Return the sum of tensors times shares, rounded to `dtype`; only the sum and one tensor are in memory at once."""
    total: Tensor | None = None
    for tensor, share in parts:
        # The sum does not start from zeros: a negative zero added to them would lose its sign.
        total = tensor.double().mul_(share) if total is None else total.add_(tensor, alpha=share)
        del tensor  # before the next one is read
    assert total is not None, "parts is empty"
    return total.to(dtype)


def _refuse_different_models(checkpoints: Sequence[Path]) -> None:
    """Raise InputError if the model of a checkpoint differs from the first one's in any field."""
    first = run_folder.saved_model(checkpoints[0]).resolved_fields()
    for checkpoint in checkpoints[1:]:
        other = run_folder.saved_model(checkpoint).resolved_fields()
        differences = [f"{name} {first[name]} and {other[name]}" for name in first if first[name] != other[name]]
        if differences:
            raise InputError(
                f"{checkpoints[0]} and {checkpoint} are of different models ({', '.join(differences)}); name "
                "checkpoints of one model"
            )


def _same_file(kind: str, files: Iterable[Path | None]) -> Path | None:
    """Return the first of the files that exist, None if none does; raise InputError if two of them differ."""
    present = [file for file in files if file is not None and file.is_file()]
    for file in present[1:]:
        if file.read_bytes() != present[0].read_bytes():
            raise InputError(
                f"{present[0]} and {file} are different {kind}s, whose checkpoints have no common average; name "
                "checkpoints that were trained with one"
            )
    return present[0] if present else None
