"""`merge`: the weighted average of checkpoints of one model, one tensor at a time, with a receipt.

The float32 main weights of a run in bf16 are averaged. Sums are float64 and rounded once, to the format written: an
average is exact to half a unit in its last place (but for float64's own 1e-16), and the average of a checkpoint with
itself is that checkpoint, bit for bit.
"""

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, open_full_tensors
from megatron_fanformer.checkpoint.manifest import MANIFEST, versions
from megatron_fanformer.convert.checkpoints import (
    lock_of_run,
    open_checkpoint,
    removed_means_input_error,
    write_checkpoint,
)
from megatron_fanformer.convert.model_card import RECEIPT, Extras
from megatron_fanformer.convert.name_table import check_tensors
from megatron_fanformer.convert.receipt import side
from megatron_fanformer.data.chat_template import CHAT_TEMPLATE_JINJA, own_template
from megatron_fanformer.durable_files import new_folder, sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.terminal import table


def merge_checkpoints(
    sources: Sequence[tuple[Path, str]], shares: Sequence[float], output: Path, dtype: str | None = None
) -> list[str]:
    """Write the average of checkpoints into a new folder, as its checkpoint of step 0; return lines about it.

    Args:
        sources: the path of each checkpoint, and its URL or absolute path for the receipt.
        shares: the weight of each checkpoint; their sum is 1.
        dtype: number format of the average, fp32 or bf16; None: the narrowest that holds the sources'.

    Raises:
        InputError: they are of different models, tokenizers or chat templates, the folder exists, or a checkpoint was
            removed meanwhile; there is no new folder then.
        CorruptError: one is damaged; there is no folder then.
    """
    paths = [path for path, _ in sources]
    with removed_means_input_error(paths):
        for path in paths:
            run_folder.check_sound(path)  # a damaged tokenizer is damaged, rather than another one
        _check_models(paths)
        model = run_folder.saved_model(paths[0])
        tokenizer = _same_file("tokenizer", map(run_folder.attached_tokenizer, paths))
        template = _same_file("chat template", (path / CHAT_TEMPLATE_JINJA for path in paths))
        opened = [open_full_tensors(path, main=True) for path in paths]
        for tensors in opened:
            check_tensors(tensors.meta, model, "megatron")
        types = [{tensor.dtype for tensor in tensors.meta.values()} for tensors in opened]
        number_format = torch_dtype(dtype) if dtype else reduce(torch.promote_types, set[torch.dtype]().union(*types))
        extras = Extras(
            name=output.name, tokenizer=tokenizer, chat_template=own_template(template.parent) if template else None
        )

        def average(name: str) -> Tensor:
            parts = ((tensors[name], share) for tensors, share in zip(opened, shares, strict=True))
            return _average(parts, number_format)

        meta = {name: tensor.to(number_format) for name, tensor in opened[0].meta.items()}
        read_in = [" and ".join(sorted(map(_name, kinds))) for kinds in types]
        rows = list(zip(sources, shares, read_in, strict=True))
        with lock_of_run(output), new_folder(output) as folder:
            write_checkpoint("megatron", folder, model, LazyTensors(meta, average), extras)
            receipt = {
                "sources": [_source(path, origin, share, kinds) for (path, origin), share, kinds in rows],
                "summed_in": "float64",
                "destination": side(open_checkpoint(folder), output, hashed=True),
                "versions": versions(),
            }
            (folder / RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n")
    return [
        f"wrote {output}",
        *table(
            ("averaged", "weight", "read in"),
            [(origin, f"{share:.4g}", kinds) for (_, origin), share, kinds in rows],
            align="lrl",
        ),
        f"{len(meta)} tensors, summed in float64, written as {_name(number_format)}; {RECEIPT} has the sources",
        "left out: the optimizer's state; training on the average starts with a fresh one",
    ]


def _source(path: Path, origin: str, share: float, read_in: str) -> dict[str, Any]:
    """Return the receipt's entry of one averaged checkpoint."""
    manifest = path / MANIFEST
    return {
        "path": origin,
        "step": run_folder.step_of(path),
        "weight": share,
        "read_in": read_in,
        "manifest_sha256": sha256_of(manifest) if manifest.is_file() else None,
    }


def _average(parts: Iterable[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
    """Return the sum of tensors times their shares; each is requested in its turn, and then dropped."""
    total: Tensor | None = None
    for tensor, share in parts:
        # not added to zeros, where a negative zero would lose its sign
        total = tensor.double().mul_(share) if total is None else total.add_(tensor, alpha=share)
        del tensor
    assert total is not None, "parts is empty"
    return total.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_models(checkpoints: Sequence[Path]) -> None:
    first = run_folder.saved_model(checkpoints[0]).resolved_fields()
    for checkpoint in checkpoints[1:]:
        other = run_folder.saved_model(checkpoint).resolved_fields()
        if unlike := [f"{name} {first[name]} and {other[name]}" for name in first if first[name] != other[name]]:
            raise InputError(
                f"{checkpoints[0]} and {checkpoint} are of different models ({', '.join(unlike)}); name checkpoints of "
                "one model"
            )


def _same_file(kind: str, files: Iterable[Path | None]) -> Path | None:
    """Return the first of the files that exist; None if none does.

    Raises:
        InputError: two differ.
    """
    present = [file for file in files if file is not None and file.is_file()]
    for file in present[1:]:
        if file.read_bytes() != present[0].read_bytes():
            raise InputError(
                f"{present[0]} and {file} are different {kind}s, whose checkpoints have no common average; name "
                "checkpoints that were trained with one"
            )
    return present[0] if present else None
