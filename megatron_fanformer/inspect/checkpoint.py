"""Describes and verifies a run's checkpoints and Megatron-LM's, with torch alone and no process group.

No weights are read to describe. What a checkpoint of Megatron-LM holds, in full, its conversion says.
"""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.manifest import check_small_files, read_manifest
from megatron_fanformer.checkpoint.stored_files import (
    METADATA,
    bytes_stored,
    check_parts,
    check_plain_values,
    check_stored,
    read_table,
    saved_progress,
    stored_parts,
    tensors_of,
)
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.convert.recognition import Target, checkpoint_of
from megatron_fanformer.data.chat_template import own_template
from megatron_fanformer.data.fingerprint import fingerprint_from_plain
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.inspect.report import Report, reading
from megatron_fanformer.inspect.run_progress import read_progress
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.terminal import plural, size
from megatron_fanformer.train.metrics import last_metrics


def describe_run(run: Path) -> Report:
    """Describe a run: how far it has come, its checkpoints, and the newest of them in `parts`.

    Raises:
        CorruptError: its newest checkpoint cannot be read.
    """
    latest = run_folder.latest_checkpoint(run)
    return {
        "kind": "run",
        "path": str(run),
        "progress": read_progress(run),
        "checkpoints": [checkpoint.name for checkpoint in run_folder.complete_checkpoints(run)],
        "last_metrics": last_numbers(run),
        **({"parts": [describe_checkpoint(latest)]} if latest else {}),
    }


def describe_checkpoint(checkpoint: Path) -> Report:
    """Return one checkpoint: step, model, layout, precision, data and what is stored.

    Raises:
        CorruptError: it cannot be read, or holds more than data.
    """
    check_small_files(checkpoint)
    config, saved = run_folder.saved_model(checkpoint), run_folder.saved_config(checkpoint)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table)
    progress = saved_progress(checkpoint, table)
    data = fingerprint_from_plain(progress.data, checkpoint) if progress else None
    sizes = [path.stat().st_size for path in checkpoint.iterdir() if path.is_file()]
    tensors = tensors_of(table)
    weights = [name for name in tensors if not name.startswith(OPTIMIZER_PREFIX)]
    return {
        "kind": "checkpoint",
        "path": str(checkpoint),
        "step": progress.step if progress else None,
        "consumed_samples": progress.consumed_samples if progress else None,
        "consumed_tokens": progress.consumed_samples * config.seq_length if progress else None,
        "model": model_facts(config),
        "layout": saved.get("parallel"),
        "data": data.as_plain() if data else None,
        "sources": progress.sources if progress else None,
        "dtype": saved.get("precision", {}).get("dtype"),
        "format": "torch_dist",
        "tensors": len(weights),
        "optimizer_tensors": len(tensors) - len(weights),
        "files": len(sizes),
        "bytes": sum(sizes),
        **text_facts(checkpoint),
    }


def model_facts(config: FANformerConfig) -> dict[str, Any]:
    """Return the model's configuration and the sizes that follow from it."""
    counts = {"parameters": config.num_parameters, "padded_vocab_size": config.padded_vocab_size}
    return {"title": config.placement.title, **counts, **dataclasses.asdict(config)}


def text_facts(folder: Path) -> dict[str, Any]:
    """Return the tokenizer beside the weights, and whether it has a chat template.

    Raises:
        CorruptError: a checkpoint's tokenizer is a link to somewhere else.
        InputError: the chat template cannot be read.
    """
    tokenizer = run_folder.attached_tokenizer(folder)
    return {
        "tokenizer": tokenizer.name if tokenizer else None,
        "chat_template": own_template(folder) is not None,
    }


def last_numbers(run: Path) -> dict[str, Any] | None:
    """Return the numbers in the metrics of a run's last step; None where there are none, or they cannot be read."""
    try:
        metrics = last_metrics(run)
    except OSError:
        return None
    return metrics and {name: value for name, value in metrics.items() if isinstance(value, int | float)}


# -- whether it is whole


def check_checkpoint(checkpoint: Path) -> str:
    """Check every file against the manifest, and that every tensor is complete; returns what was checked.

    It begins with the checkpoint's name: what is shown above it is a run's newest, which may be a newer one by then.

    Raises:
        CorruptError: something is missing or damaged; names the file, and what.
    """
    with reading(bytes_stored(checkpoint)) as advance:
        check_stored(checkpoint, advance=advance)
    table = read_table(checkpoint)
    tensors, config = tensors_of(table), run_folder.saved_model(checkpoint)
    for name, shape in expected_shapes(config, "megatron").items():
        stored = tuple(tensors[name].size) if name in tensors else None
        if stored != shape:
            raise CorruptError(
                f"{checkpoint / METADATA} has {name} of shape {stored or 'none'}, where the model in "
                f"{run_folder.CONFIG} has {shape}; use another checkpoint"
            )
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CorruptError(f"{checkpoint / METADATA} does not hold all of {name}; use another checkpoint")
    manifest = read_manifest(checkpoint)
    if manifest is not None and manifest.has_sums:
        what = f"SHA-256 of {plural(len(manifest.files), 'file')}"
    else:
        what = f"CRC-32 of {plural(len(list(stored_parts(table))), 'stored part')}"
    return f"{checkpoint.name}: {what}, {size(bytes_stored(checkpoint))}; every tensor is complete"


# -- Megatron-LM's


def describe_megatron_lm(target: Target) -> Report:
    """Describe the checkpoint that is meant, and how many tensors it has.

    Raises:
        InputError: it is in a format that is not read.
        CorruptError: its table cannot be read.
    """
    folder = checkpoint_of(target)
    table = read_table(folder)
    return {
        "kind": target.kind,
        "path": str(folder),
        "tensors": len(tensors_of(table)),
        "bytes": sum(part.length for part in stored_parts(table)),
        "to_use_it": f"{PROGRAM} convert {folder} DESTINATION --to megatron",
    }


def check_megatron_lm(target: Target) -> str:
    """Check every stored tensor and object by its own CRC-32; returns what was checked.

    Raises:
        CorruptError: one is missing or damaged; names its file.
    """
    folder = checkpoint_of(target)
    parts = list(stored_parts(read_table(folder)))
    with reading(sum(part.length for part in parts)) as advance:
        check_parts(folder, parts, advance)
    return f"CRC-32 of {plural(len(parts), 'stored part')}"
