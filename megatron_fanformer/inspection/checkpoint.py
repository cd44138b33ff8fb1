"""Describes a run and its checkpoints; no weights are read. torch alone is needed, and no process group."""

import dataclasses
import io
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_fanformer.checkpoint import store
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.inspection.model_rows import model_facts, model_rows
from megatron_fanformer.inspection.report import Report, plural, size, some
from megatron_fanformer.inspection.target import CHECKPOINTS
from megatron_fanformer.training.metrics import METRICS

COMMON, COMMON_STATE = "common.pt", "common_state/"
OPTIMIZER = "optimizer."
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}
METRICS_TAIL_BYTES = 1 << 16

Rows = list[tuple[str, str]]


def describe_run(run: Path) -> Report:
    """A run's folder: its checkpoints, its last step, and the newest checkpoint in full.

    Raises:
        CorruptError: its newest checkpoint cannot be read.
    """
    names = checkpoint_names(run)
    latest = store.latest_checkpoint(run)
    last = last_metrics(run)
    rows = [("checkpoints", f"{len(names)}: {some(names)}" if names else "none")]
    if last:
        rows.append((METRICS, ", ".join(f"{name} {last[name]:g}" for name in ("step", "loss") if name in last)))
    facts = {"kind": "run", "path": str(run), "checkpoints": names, "last_metrics": last}
    return Report(f"{run}: run", facts, rows, [describe_checkpoint(latest)] if latest else [])


def checkpoint_names(run: Path) -> list[str]:
    """The complete checkpoints of a run, the oldest first."""
    return sorted(path.name for path in (run / CHECKPOINTS).glob("step-*") if store.is_checkpoint(path))


def describe_checkpoint(checkpoint: Path) -> Report:
    """One checkpoint: step, model, layout, precision and what is stored.

    Raises:
        CorruptError: it cannot be read.
    """
    config, saved = store.saved_model(checkpoint), store.saved_config(checkpoint)
    table = read_table(checkpoint)
    progress = read_progress(checkpoint, table)
    tokenizer = store.attached_tokenizer(checkpoint)
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    weights, states = _stored(table)
    facts = {
        "kind": "checkpoint",
        "path": str(checkpoint),
        "step": progress.get("step"),
        "consumed_samples": progress.get("consumed_samples"),
        "model": {**dataclasses.asdict(config), **model_facts(config)},
        "layout": saved.get("parallel"),
        "dtype": saved.get("precision", {}).get("dtype"),
        "format": "torch_dist",
        "tensors": weights,
        "optimizer_tensors": states,
        "files": len(files),
        "bytes": total,
        "tokenizer": tokenizer.name if tokenizer else None,
    }
    rows = [
        *_progress_rows(progress, config.seq_length),
        *model_rows(config),
        *([("layout", _layout(saved))] if "parallel" in saved else []),
        ("stored", f"{plural(weights, 'tensor')}, {states:,} of the optimizer; torch_dist, {_types(table)}"),
        ("files", f"{len(files)}, {size(total)}"),
        ("tokenizer", tokenizer.name if tokenizer else "none"),
    ]
    return Report(f"{checkpoint}: checkpoint", facts, rows)


def _progress_rows(progress: dict[str, Any], seq_length: int) -> Rows:
    if not progress:
        return [("step", "none: converted weights, not a run's")]
    samples = progress["consumed_samples"]
    return [("step", f"{progress['step']:,}, after {samples:,} samples, {samples * seq_length:,} tokens")]


def _layout(saved: dict[str, Any]) -> str:
    parallel = saved["parallel"]
    degrees = ", ".join(f"{short} {parallel.get(name) or 1}" for short, name in DEGREES.items())
    optimizer = "distributed optimizer" if parallel.get("use_distributed_optimizer") else "plain optimizer"
    dtype = saved.get("precision", {}).get("dtype", "?")
    return f"{degrees}; {optimizer}; {dtype} on {parallel.get('device', '?')}"


def last_metrics(run: Path) -> dict[str, Any] | None:
    """The last whole line of a run's metrics.jsonl."""
    try:
        with (run / METRICS).open("rb") as stream:
            stream.seek(max(0, (run / METRICS).stat().st_size - METRICS_TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except FileNotFoundError:
        return None
    return json.loads(lines[-2]) if len(lines) > 1 else None  # what follows the last line's end is torn, or nothing


# -- what is in it


class Stored(NamedTuple):
    """Where one part of a tensor, or an object, stands."""

    name: str
    file: str
    offset: int
    length: int


def read_table(checkpoint: Path) -> Metadata:
    """The table of a checkpoint's tensors.

    Raises:
        CorruptError: it cannot be read.
    """
    with damage_told(checkpoint, ".metadata"):
        table = FileSystemReader(checkpoint).read_metadata()
    if not isinstance(table, Metadata) or not table.storage_data:
        raise CorruptError(f"{checkpoint / '.metadata'} holds no table of tensors; take an earlier checkpoint")
    return table


def read_progress(checkpoint: Path, table: Metadata) -> dict[str, Any]:
    """The step and the samples consumed that a run goes on from; empty for converted weights.

    megatron-core 0.16 keeps plain values in a file of their own, later versions among the tensors.
    """
    place = next((part for part in stored_parts(table) if part.name.startswith(COMMON_STATE)), None)
    file = place.file if place else COMMON
    with damage_told(checkpoint, file), (checkpoint / file).open("rb") as stream:
        if place is None:
            common = torch.load(stream, map_location="cpu", weights_only=True)
        else:
            stream.seek(place.offset)
            (common,) = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        return dict(common.get("progress", {}))


def stored_parts(table: Metadata) -> Iterator[Stored]:
    """Every part of every tensor or object, file by file in the order of their bytes."""
    parts = [
        Stored(index.fqn, info.relative_path, info.offset, info.length) for index, info in table.storage_data.items()
    ]
    yield from sorted(parts, key=lambda part: (part.file, part.offset))


def tensors_of(table: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors in a table, by name."""
    return {
        name: value for name, value in table.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def _stored(table: Metadata) -> tuple[int, int]:
    states = sum(name.startswith(OPTIMIZER) for name in tensors_of(table))
    return len(tensors_of(table)) - states, states


def _types(table: Metadata) -> str:
    """Of the weights alone."""
    types = {value.properties.dtype for name, value in tensors_of(table).items() if not name.startswith(OPTIMIZER)}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


@contextmanager
def damage_told(checkpoint: Path, file: str) -> Iterator[None]:
    """Around reading a file of a checkpoint: what damage leads to becomes a CorruptError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptError(f"{checkpoint / file} cannot be read ({reason[0]}); take another checkpoint") from error
