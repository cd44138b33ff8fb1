"""Describes and verifies runs, checkpoints and exports, without a process group. Describing reads no weights."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import check_archive
from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.manifest import check_small_files, read_manifest
from megatron_fanformer.checkpoint.run_lock import holder_of
from megatron_fanformer.checkpoint.stored_files import (
    METADATA,
    check_plain_values,
    check_stored,
    read_table,
    saved_progress,
    tensors_of,
)
from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.convert.name_table import Format, expected_shapes
from megatron_fanformer.convert.recognition import Target
from megatron_fanformer.convert.reference import open_reference
from megatron_fanformer.convert.weight_files import weight_files
from megatron_fanformer.data.chat_template import read_template
from megatron_fanformer.data.fingerprint import fingerprint_from_plain
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.terminal import plural, size
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX, SMOOTHED_SHARE, VALIDATION_PREFIX
from megatron_fanformer.train.recovery import read_events

Report = dict[str, Any]
PICKLE_SUFFIXES = (".pt", ".bin")
"""Suffixes of weight files that are torch archives, whose records have a CRC-32; safetensors have none."""
FEWEST_AVERAGED = 10  # steps; in runs of over 200 steps, the last twentieth is averaged


def describe_run(run: Path) -> Report:
    """Describe a run's progress and checkpoints, the newest one in `parts`; CorruptError if that one is damaged."""
    latest = run_folder.latest_checkpoint(run)
    return {
        "kind": "run",
        "path": str(run),
        "progress": read_progress(run),
        "checkpoints": [checkpoint.name for checkpoint in run_folder.complete_checkpoints(run)],
        **({"parts": [describe_checkpoint(latest)]} if latest else {}),
    }


def describe_checkpoint(checkpoint: Path) -> Report:
    """Describe a checkpoint: its step, model, layout, precision, data and files; CorruptError if it is damaged."""
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
    """Return a model's title, number of parameters, padded vocabulary size, and all fields of its configuration."""
    counts = {"parameters": config.num_parameters, "padded_vocab_size": config.padded_vocab_size}
    return {"title": config.placement.title, **counts, **dataclasses.asdict(config)}


def text_facts(folder: Path) -> dict[str, Any]:
    """Return the name of the tokenizer's file in a folder, and whether the folder has a chat template.

    Raises:
        CorruptError: the tokenizer of a checkpoint is a link to another folder.
        InputError: the chat template cannot be read.
    """
    tokenizer = run_folder.attached_tokenizer(folder)
    return {
        "tokenizer": tokenizer.name if tokenizer else None,
        "chat_template": read_template(folder) is not None,
    }


# -- verification


def check_checkpoint(checkpoint: Path) -> str:
    """Check every file against the manifest, and that every tensor is complete; return a line that says so.

    The line names the checkpoint, because the run's report, which is made later, may describe a newer one.

    Raises:
        CorruptError: a file is missing or damaged, or a tensor is missing, incomplete or of a wrong shape.
    """
    check_stored(checkpoint)
    tensors, config = tensors_of(read_table(checkpoint)), run_folder.saved_model(checkpoint)
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
    files = read_manifest(checkpoint).files.values()
    total = size(sum(file.bytes for file in files))
    return f"{checkpoint.name}: SHA-256 of {plural(len(files), 'file')}, {total}; every tensor is complete"


# -- exports


def describe_export(target: Target) -> Report:
    """Describe the model of an export, the type of the weights, and their files.

    Raises:
        InputError: the model cannot be built here.
        CorruptError: a file is missing or cannot be read.
    """
    kind, config, tensors = _open_export(target)
    files = weight_files(target.path)
    return {
        "kind": kind,
        "path": str(target.path),
        "model": model_facts(config),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})),
        "tensors": len(tensors),
        "stored_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "shards": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        **text_facts(target.path),
    }


def _open_export(target: Target) -> tuple[Format, FANformerConfig, Mapping[str, Tensor]]:
    """Return the format and the configuration of an export, and its tensors on the meta device."""
    kind: Format = "hf" if target.kind == "hf" else "reference"
    config, tensors = open_huggingface(target.path) if kind == "hf" else open_reference(target.path)
    return kind, config, tensors.meta


def check_export(target: Target) -> str:
    """Check that an export has exactly the tensors of its model, in their shapes; return a line that says so.

    Raises:
        CorruptError: a tensor is missing, unknown or of another shape, or a file is damaged.
    """
    kind, config, tensors = _open_export(target)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = expected_shapes(config, kind)
    for name in expected.keys() | shapes.keys():
        if shapes.get(name) != expected.get(name):
            raise CorruptError(
                f"{target.path} has {name} of shape {shapes.get(name) or 'none'} where its model has"
                f" {expected.get(name) or 'none'}; copy it again"
            )
    archives = [file for file in weight_files(target.path) if file.suffix in PICKLE_SUFFIXES]
    for file in archives:
        check_archive(file, "its weights", file)
    checksums = "the CRC-32 of their bytes" if archives else "safetensors have no checksum of their bytes"
    return f"{plural(len(expected), 'tensor')} by name, shape and place; {checksums}"


# -- the progress of a run


def read_progress(run: Path) -> Report:
    """Return the progress of a run, as far as the files in its folder can be read.

    `step` is the last step in the metrics, `saved` the step that `train` goes on from (0: the beginning). `loss` is the
    mean and `step_seconds` the median over the last twentieth of the steps. `seconds_left`, an estimate by the median,
    leaves out evaluations and saves; None if no process runs. `events` counts the events in recovery.jsonl by kind.
    """
    holder, saved, steps = holder_of(run), _saved_step(run), None
    with suppress(CorruptError):
        steps = run_folder.read_mapping(run / run_folder.CONFIG).get("training", {}).get("train_iters")
    losses: list[float] = []
    seconds: list[float] = []
    validation: dict[str, float] = {}
    step, tokens = saved, None
    with suppress(FileNotFoundError), (run / run_folder.METRICS).open("rb") as stream:  # one line in memory at a time
        for entry in filter(None, map(run_folder.metrics_entry, stream)):
            step, tokens = max(step, entry["step"]), entry.get("tokens", tokens)
            if entry.get("loss") is not None:
                losses.append(entry["loss"])
            if "step_seconds" in entry:
                seconds.append(entry["step_seconds"])
            validation |= _validation_losses(entry)
    window = max(FEWEST_AVERAGED, len(losses) // SMOOTHED_SHARE)
    step_seconds = statistics.median(seconds[-window:]) if seconds else None
    if holder is not None:
        state = f"runs on {holder.host} (process {holder.pid}) since {holder.since}"
    elif steps is not None and saved >= steps:
        state = "complete"
    else:
        state = f"nothing runs: train goes on from {f'step {saved:,}' if saved else 'the beginning'}"
    return {
        "step": step,
        "steps": steps,
        "state": state,
        "saved": saved,
        "tokens": tokens,
        "loss": statistics.fmean(losses[-window:]) if losses else None,
        "validation": validation,
        "step_seconds": step_seconds,
        "seconds_left": step_seconds * max(0, steps - step) if holder and step_seconds and steps else None,
        "events": dict(Counter(event["event"] for event in read_events(run))),
    }


def _saved_step(run: Path) -> int:
    """Return the step of the checkpoint that a run goes on from; 0 if there is none. Tensors are not checked.

    This step may be earlier than the last in the metrics: a killed run has logged steps that no checkpoint has.
    """
    with suppress(CorruptError):  # the file `latest` names a checkpoint, but there is none
        for checkpoint in run_folder.checkpoints_to_resume(run):
            with suppress(CorruptError):
                run_folder.check_sound(checkpoint)
                return run_folder.step_of(checkpoint) or 0
    return 0


def _validation_losses(entry: Report) -> Iterator[tuple[str, float]]:
    """Yield the name and the loss of each validation set in an entry of the metrics."""
    for name, value in entry.items():
        if name.startswith(VALIDATION_PREFIX):
            yield name.removeprefix(VALIDATION_PREFIX), value
        elif name.startswith("eval/") and name.endswith(PERPLEXITY_LOSS_SUFFIX):
            yield name.removeprefix("eval/").removesuffix(PERPLEXITY_LOSS_SUFFIX), value
