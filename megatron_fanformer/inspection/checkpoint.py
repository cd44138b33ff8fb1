"""Describes a run and its checkpoints; no weights are read. It needs only torch, and no process group."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.manifest import check_small_files
from megatron_fanformer.checkpoint.plain_values import SavedProgress, check_plain_values, saved_progress
from megatron_fanformer.checkpoint.tensor_table import Table, read_table, tensors_of
from megatron_fanformer.data.config import TRAINING
from megatron_fanformer.data.identity import SHOWN_DIGITS, DataIdentity, SetIdentity, identity_from_plain
from megatron_fanformer.formats.training_record import layout
from megatron_fanformer.inspection.model_rows import model_facts, model_rows, text_facts, text_row
from megatron_fanformer.inspection.report import Report, plural, size, some
from megatron_fanformer.training.metrics import last_metrics

Rows = list[tuple[str, str]]


def describe_run(run: Path) -> Report:
    """A run's folder: its checkpoints, its last step, and the newest checkpoint in full.

    Raises:
        CorruptError: its newest checkpoint cannot be read.
    """
    names = [checkpoint.name for checkpoint in store.complete_checkpoints(run)]
    latest = store.latest_checkpoint(run)
    last = last_numbers(run)
    rows = [("checkpoints", f"{len(names)}: {some(names)}" if names else "none")]
    if last:
        rows.append((store.METRICS, ", ".join(f"{name} {last[name]:g}" for name in ("step", "loss") if name in last)))
    facts = {"kind": "run", "path": str(run), "checkpoints": names, "last_metrics": last}
    return Report(f"{run}: run", facts, rows, [describe_checkpoint(latest)] if latest else [])


def describe_checkpoint(checkpoint: Path) -> Report:
    """One checkpoint: step, model, layout, precision and what is stored.

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
    weights, states = _stored(table)
    facts = {
        "kind": "checkpoint",
        "path": str(checkpoint),
        "step": progress.step if progress else None,
        "consumed_samples": progress.consumed_samples if progress else None,
        "model": {**dataclasses.asdict(config), **model_facts(config)},
        "layout": saved.get("parallel"),
        "data": data.as_plain() if data else None,
        "dtype": saved.get("precision", {}).get("dtype"),
        "format": "torch_dist",
        "tensors": weights,
        "optimizer_tensors": states,
        "files": len(files),
        "bytes": total,
        **text,
    }
    rows = [
        *_progress_rows(progress, config.seq_length),
        *(_data_rows(data) if data else []),
        *model_rows(config),
        *([("layout", layout(saved))] if "parallel" in saved else []),
        ("stored", f"{plural(weights, 'tensor')}, {states:,} of the optimizer; torch_dist, {_types(table)}"),
        ("files", f"{len(files)}, {size(total)}"),
        text_row(text),
    ]
    return Report(f"{checkpoint}: checkpoint", facts, rows)


def _progress_rows(progress: SavedProgress | None, seq_length: int) -> Rows:
    if progress is None:
        return [("step", "none: converted weights, not a run's")]
    step, samples = progress.step, progress.consumed_samples
    return [("step", f"{step:,}, after {samples:,} samples, {samples * seq_length:,} tokens")]


def _data_rows(data: DataIdentity) -> Rows:
    return [
        *(("data", f"{name}: {_files(own)}") for name, own in [(TRAINING, data.train), *data.valid.items()]),
        *(("changed", f"after step {each.step:,}, {each.name}: {each.what}") for each in data.changes),
    ]


def _files(data: SetIdentity) -> str:
    named = some(f"{file.path} ({file.content[:SHOWN_DIGITS]})" for file in data.files)
    return f"{plural(sum(file.tokens for file in data.files), 'token')} of {named}"


def last_numbers(run: Path) -> dict[str, Any] | None:
    """The numbers in the metrics of a run's last step; None where there are none, or they cannot be read."""
    try:
        found = last_metrics(run)
    except OSError:
        return None
    return found and {name: value for name, value in found.items() if isinstance(value, int | float)}


# -- what is in it


def _stored(table: Table) -> tuple[int, int]:
    states = sum(name.startswith(OPTIMIZER_PREFIX) for name in tensors_of(table))
    return len(tensors_of(table)) - states, states


def _types(table: Table) -> str:
    """Of the weights alone."""
    types = {
        value.properties.dtype for name, value in tensors_of(table).items() if not name.startswith(OPTIMIZER_PREFIX)
    }
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
