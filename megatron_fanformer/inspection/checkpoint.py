"""Describes and verifies a run's checkpoints and Megatron-LM's, with torch alone and no process group.

No weights are read to describe. What a checkpoint of Megatron-LM holds, in full, its conversion says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.manifest import check_small_files, read_manifest
from megatron_fanformer.checkpoint.stored_files import (
    SavedProgress,
    bytes_stored,
    check_parts,
    check_plain_values,
    check_stored,
    saved_progress,
)
from megatron_fanformer.checkpoint.tensor_table import METADATA, read_table, stored_parts, tensors_of
from megatron_fanformer.data.config import TRAINING
from megatron_fanformer.data.identity import SHOWN_DIGITS, DataIdentity, SetIdentity, StageIdentity, identity_from_plain
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.name_table import expected_shapes
from megatron_fanformer.formats.recognition import Target, iteration_of
from megatron_fanformer.formats.training_record import layout
from megatron_fanformer.inspection.model_rows import model_facts, model_rows, text_facts, text_row
from megatron_fanformer.inspection.report import Progress, Report
from megatron_fanformer.inspection.run_progress import read_progress
from megatron_fanformer.terminal import plural, size, some
from megatron_fanformer.training.metrics import last_metrics

SHOWN_SOURCES = 20


def describe_run(run: Path) -> Report:
    """Describe a run's folder: how far it has come, its checkpoints, and the newest checkpoint in full.

    Raises:
        CorruptError: its newest checkpoint cannot be read.
    """
    names = [checkpoint.name for checkpoint in store.complete_checkpoints(run)]
    latest = store.latest_checkpoint(run)
    progress = read_progress(run)
    rows = [*progress.rows(), ("checkpoints", f"{len(names)}: {some(names)}" if names else "none")]
    facts = {
        "kind": "run",
        "path": str(run),
        "checkpoints": names,
        "progress": progress.as_object(),
        "last_metrics": last_numbers(run),
    }
    return Report(f"{run}: run", facts, rows, [describe_checkpoint(latest)] if latest else [])


def describe_checkpoint(checkpoint: Path) -> Report:
    """Return one checkpoint: step, model, layout, precision and what is stored.

    Raises:
        CorruptError: it cannot be read, or holds more than data.
    """
    check_small_files(checkpoint)
    config, saved = store.saved_model(checkpoint), store.saved_config(checkpoint)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table)
    progress = saved_progress(checkpoint, table)
    data = identity_from_plain(progress.data, checkpoint) if progress else None
    text = text_facts(checkpoint)
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    tensors = tensors_of(table)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    types = sorted({str(tensor.properties.dtype).removeprefix("torch.") for tensor in weights.values()})
    states = len(tensors) - len(weights)
    facts = {
        "kind": "checkpoint",
        "path": str(checkpoint),
        "step": progress.step if progress else None,
        "consumed_samples": progress.consumed_samples if progress else None,
        "model": model_facts(config),
        "layout": saved.get("parallel"),
        "data": data.as_plain() if data else None,
        "sources": progress.sources if progress else None,
        "dtype": saved.get("precision", {}).get("dtype"),
        "format": "torch_dist",
        "tensors": len(weights),
        "optimizer_tensors": states,
        "files": len(files),
        "bytes": total,
        **text,
    }
    rows = [
        *_progress_rows(progress, data, config.seq_length),
        *model_rows(config),
        *([("layout", layout(saved))] if "parallel" in saved else []),
        ("stored", f"{plural(len(weights), 'tensor')}, {states:,} of the optimizer; torch_dist, {', '.join(types)}"),
        ("files", f"{len(files)}, {size(total)}"),
        text_row(text),
    ]
    return Report(f"{checkpoint}: checkpoint", facts, rows)


def _progress_rows(
    progress: SavedProgress | None, data: DataIdentity | None, seq_length: int
) -> Iterator[tuple[str, str]]:
    if progress is None:
        yield "step", "none: converted weights, not a run's"
        return
    samples = progress.consumed_samples
    yield "step", f"{progress.step:,}, after {samples:,} samples, {samples * seq_length:,} tokens"
    if data is not None:
        for name, files in [(TRAINING, data.train), *data.valid.items()]:
            yield "data", f"{name}: {_files(files)}"
        for stage in data.train.stages:
            yield "stage", f"from step {stage.first_step:,}: {_files(stage)}"
        for change in data.changes:
            yield "changed", f"after step {change.step:,}, {change.name}: {change.what}"
    sources = [*(progress.sources or {}).items()]
    for name, read in sources[:SHOWN_SOURCES]:
        yield "trained on", f"{name}: {read['tokens']:,.0f} tokens, {read['epochs']:.3g} epochs"
    if len(sources) > SHOWN_SOURCES:
        yield "", f"and {len(sources) - SHOWN_SOURCES} more; --json has all"


def _files(data: SetIdentity | StageIdentity) -> str:
    named = some(f"{file.path} ({file.content[:SHOWN_DIGITS]})" for file in data.files)
    return f"{plural(sum(file.tokens for file in data.files), 'token')} of {named}"


def last_numbers(run: Path) -> dict[str, Any] | None:
    """Return the numbers in the metrics of a run's last step; None where there are none, or they cannot be read."""
    try:
        found = last_metrics(run)
    except OSError:
        return None
    return found and {name: value for name, value in found.items() if isinstance(value, int | float)}


# -- whether it is whole


def check_checkpoint(checkpoint: Path, progress: Progress) -> str:
    """Check every file against the manifest, and that every tensor is complete; returns what was checked.

    It begins with the checkpoint's name: what is shown above it is a run's newest, which may be a newer one by then.

    Raises:
        CorruptError: something is missing or damaged; names the file, and what.
    """
    with progress(bytes_stored(checkpoint)) as advance:
        check_stored(checkpoint, advance=advance)
    table = read_table(checkpoint)
    tensors, config = tensors_of(table), store.saved_model(checkpoint)
    for name, shape in expected_shapes(config, "megatron").items():
        found = tuple(tensors[name].size) if name in tensors else None
        if found != shape:
            raise CorruptError(
                f"{checkpoint / METADATA} has {name} of shape {found or 'none'}, where the model in {store.CONFIG} has "
                f"{shape}; use another checkpoint"
            )
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CorruptError(f"{checkpoint / METADATA} does not hold all of {name}; use another checkpoint")
    if manifest := read_manifest(checkpoint):
        what = plural(len(manifest.files), "file")
    else:
        what = plural(len(list(stored_parts(table))), "stored part")
    return f"{checkpoint.name}: CRC-32 of {what}, {size(bytes_stored(checkpoint))}; every tensor is complete"


# -- Megatron-LM's


def describe_megatron_lm(target: Target) -> Report:
    """Describe the checkpoint that is meant, and how many tensors it has.

    Raises:
        InputError: it is in a format that is not read.
        CorruptError: its table cannot be read.
    """
    folder = iteration_of(target)
    table = read_table(folder)
    tensors, total = len(tensors_of(table)), sum(part.length for part in stored_parts(table))
    facts = {"kind": target.kind, "path": str(folder), "tensors": tensors, "bytes": total}
    rows = [
        ("stored", f"{plural(tensors, 'tensor')}, those of the optimizer included; torch_dist, {size(total)}"),
        ("to use it", f"megatron-fanformer convert {folder} DESTINATION --to megatron"),
    ]
    return Report(f"{folder}: checkpoint of Megatron-LM", facts, rows)


def check_megatron_lm(target: Target, progress: Progress) -> str:
    """Check every stored tensor and object by its own CRC-32; returns what was checked.

    Raises:
        CorruptError: one is missing or damaged; names its file.
    """
    folder = iteration_of(target)
    parts = list(stored_parts(read_table(folder)))
    with progress(sum(part.length for part in parts)) as advance:
        check_parts(folder, parts, advance)
    return f"CRC-32 of {plural(len(parts), 'stored part')}"
