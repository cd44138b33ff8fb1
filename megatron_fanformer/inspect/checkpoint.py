"""Describe and verify runs, checkpoints and exports, and draw a run's metrics.

No weights are read to describe, and there is no process group. The conversion of a checkpoint of Megatron-LM says in
full what it holds.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import check_archive
from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.manifest import check_small_files, read_manifest
from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.checkpoint.run_lock import holder_of
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
from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.convert.name_table import Format, expected_shapes
from megatron_fanformer.convert.recognition import Target, checkpoint_of, recognise
from megatron_fanformer.convert.reference import open_reference
from megatron_fanformer.convert.weight_files import weight_files
from megatron_fanformer.data.chat_template import own_template
from megatron_fanformer.data.fingerprint import fingerprint_from_plain
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.inspect.dataset import reading
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.pictures import draw_heat_map, drawn
from megatron_fanformer.terminal import plural, size
from megatron_fanformer.train.metrics import (
    PERPLEXITY_LOSS_SUFFIX,
    SMOOTHED_SHARE,
    VALIDATION_PREFIX,
    last_metrics,
    loss_picture,
    points_of,
    read_metrics,
)
from megatron_fanformer.train.recovery import read_events

Report = dict[str, Any]
PICKLE_SUFFIXES = (".pt", ".bin")
"""Weight files that are torch archives, whose records have a CRC-32; safetensors have none."""
FEWEST_AVERAGED = 10  # steps, where there are so many; else a twentieth of them
PHASE_PANELS = {
    "health/phase_rms": "root mean square of the phase",
    "health/phase_max": "largest |phase|",
    "health/dead_units": "share of periodic units that are dead",
    "health/coarse_units": "share with phases that bf16 does not resolve",
    "health/periodic_weight_norm": "norm of W_p",
    "health/linear_weight_norm": "norm of W_g",
}
MOST_TICKS = 8


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


# -- exports


def describe_export(target: Target) -> Report:
    """Describe the model, its type and its files.

    Raises:
        InputError: the model cannot be built here.
        CorruptError: a file is missing or cannot be read.
    """
    kind, config, shapes = _opened(target)
    files = weight_files(target.path)
    return {
        "kind": kind,
        "path": str(target.path),
        "model": model_facts(config),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in shapes.values()})),
        "tensors": len(shapes),
        "stored_parameters": sum(tensor.numel() for tensor in shapes.values()),
        "shards": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        **text_facts(target.path),
    }


def _opened(target: Target) -> tuple[Format, FANformerConfig, Mapping[str, Tensor]]:
    """Return the format, the model, and its tensors on the meta device."""
    config, tensors = open_huggingface(target.path) if target.kind == "hf" else open_reference(target.path)
    return "hf" if target.kind == "hf" else "reference", config, tensors.meta


def check_export(target: Target) -> str:
    """Check that exactly the model's tensors are there, complete and in their shapes; returns what was checked.

    Raises:
        CorruptError: something is missing or damaged; names it.
    """
    kind, config, tensors = _opened(target)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = expected_shapes(config, kind)
    for name in expected.keys() | shapes.keys():
        if shapes.get(name) != expected.get(name):
            raise CorruptError(
                f"{target.path} has {name} of shape {shapes.get(name) or 'none'} where its model has"
                f" {expected.get(name) or 'none'}; copy it again"
            )
    archives = [file for file in weight_files(target.path) if file.suffix in PICKLE_SUFFIXES]
    with reading(sum(file.stat().st_size for file in archives)) as advance:
        for file in archives:
            with file.open("rb") as stream:
                check_archive(file, "its weights", stream)
            advance(file.stat().st_size)
    sums = "the CRC-32 of their bytes" if archives else "safetensors have no checksum of their bytes"
    return f"{plural(len(expected), 'tensor')} by name, shape and place; {sums}"


# -- how far a run has come


def read_progress(run: Path) -> dict[str, Any]:
    """Return how far a run has come, by what can be read of its folder.

    `saved` is the step that `train` goes on from (0: the beginning); `smoothed_loss`, `tokens_per_second` and
    `step_seconds` are the mean and the medians of the last `window` steps; `seconds_left` is at that pace, without
    evaluating and saving, and None unless the run goes on; `events` are those of recovery.jsonl, with their steps.
    """
    holder, saved, steps = holder_of(run), _saved_step(run), _planned(run)
    losses: list[float] = []
    speeds: list[tuple[float, float]] = []
    validation: dict[str, dict[int, float]] = {}
    step, tokens = saved, None
    with suppress(FileNotFoundError), (run / run_folder.METRICS).open("rb") as stream:  # one line in memory at a time
        entries = (run_folder.metrics_entry(line) for line in stream if line.endswith(b"\n"))
        for entry in (entry for entry in entries if entry is not None):
            step, tokens = max(step, entry["step"]), entry.get("tokens", tokens)
            losses += [entry["loss"]] if entry.get("loss") is not None else []
            if "tokens_per_second" in entry and "step_seconds" in entry:
                speeds.append((entry["tokens_per_second"], entry["step_seconds"]))
            for name, value in _evaluated(entry):
                validation.setdefault(name, {})[entry["step"]] = value
    window = min(len(losses), max(FEWEST_AVERAGED, len(losses) // SMOOTHED_SHARE))
    tokens_per_second, step_seconds = (
        map(statistics.median, zip(*speeds[-max(1, window) :], strict=True)) if speeds else (None, None)
    )
    events: dict[str, list[int]] = {}
    for event in read_events(run):
        of_kind = events.setdefault(event["event"], [])
        if event["step"] not in of_kind:  # a run that went back skips a step again
            of_kind.append(event["step"])
    is_running = holder is not None
    if holder is not None:
        state = f"runs on {holder.host} (process {holder.pid}) since {holder.since}"
    elif steps is None or saved >= steps:
        state = "complete" if steps is not None else "nothing runs"
    else:
        state = f"nothing runs: train goes on from {f'step {saved:,}' if saved else 'the beginning'}"
    return {
        "step": step,
        "steps": steps,
        "state": state,
        "saved": saved,
        "tokens": tokens,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "smoothed_loss": statistics.fmean(losses[-window:]) if losses else None,
        "window": window,
        "validation": validation,
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "seconds_left": step_seconds * max(0, steps - step) if is_running and step_seconds and steps else None,
        "running": state if is_running else None,
        "events": events,
        "profiles": len([*(run / run_folder.TRACES).glob("step-*")]),
    }


def _planned(run: Path) -> int | None:
    with suppress(CorruptError):
        steps: int | None = run_folder.read_mapping(run / run_folder.CONFIG).get("training", {}).get("train_iters")
        return steps
    return None


def _saved_step(run: Path) -> int:
    """Return the step of the checkpoint that a run goes on from, as far as its small files tell; 0 where there is none.

    A step may be logged and never saved, as those since the last checkpoint of a run that was killed.
    """
    with suppress(CorruptError):  # `latest` names one, and there is none at all
        for checkpoint in run_folder.checkpoints_to_resume(run):
            with suppress(CorruptError):
                run_folder.check_sound(checkpoint)
                return run_folder.step_of(checkpoint) or 0
    return 0


def _evaluated(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the losses that a step has evaluated, by the names of their sets."""
    for name, value in entry.items():
        if name.startswith(VALIDATION_PREFIX) and value is not None:
            yield name.removeprefix(VALIDATION_PREFIX), value
        elif name.startswith("eval/") and name.endswith(PERPLEXITY_LOSS_SUFFIX) and value is not None:
            yield name.removeprefix("eval/").removesuffix(PERPLEXITY_LOSS_SUFFIX), value


# -- pictures


def draw_metrics(path: str, *, losses: Path | None = None, phases: Path | None = None) -> str:
    """Draw the losses of a run, or its phase health, into a PNG; returns a line for the user.

    Raises:
        InputError: the path is not a run's folder, has no such metrics, or the picture cannot be written.
    """
    name, picture = ("phases", phases) if losses is None else ("picture", losses)
    assert picture is not None
    target = recognise(on_this_machine(path))
    if target.kind != "run":
        raise InputError(f"--{name} draws the metrics of a run, but {path} is not a run's folder; name that")
    file = target.path / run_folder.METRICS
    metrics = read_metrics(target.path) if file.is_file() else []
    if losses is None:
        content = phase_picture(metrics, title=f"{target.path}: phases of the FAN map")
        missing = (
            "phase health: the run has not reached a step that logging.phase_interval divides, or its model has no"
            " phases"
        )
    else:
        content = loss_picture(metrics, title=str(target.path)) if points_of(metrics, "loss") else None
        missing = "loss: the run has not taken a step; draw it later"
    if content is None:
        raise InputError(f"{file} has no {missing}")
    try:
        write_atomically(picture, content)
    except OSError as error:
        raise InputError(f"--{name} {picture} cannot be written ({error.strerror}); name another file") from error
    return f"{picture}: the {'losses' if name == 'picture' else name} of {path}"


def phase_picture(metrics: Sequence[dict[str, Any]], *, title: str) -> bytes | None:
    """Return a PNG of phase health: a column for each step that has it, a row for each layer; None if no step has it.

    Shares always go from 0 to 1, so that pictures of two runs can be compared.
    """
    looks = [entry for entry in metrics if all(isinstance(entry.get(name), list) for name in PHASE_PANELS)]
    if not looks:
        return None

    def draw(panels: Any) -> None:
        ticks = range(0, len(looks), -(-len(looks) // MOST_TICKS))
        for axes, (name, title) in zip(panels.flat, PHASE_PANELS.items(), strict=True):
            limits: dict[str, Any] = {"vmin": 0.0, "vmax": 1.0} if title.startswith("share") else {}
            values = np.array([look[name] for look in looks], dtype=float).T
            draw_heat_map(axes, values, aspect="auto", interpolation="nearest", **limits)
            axes.set_xticks(list(ticks), [f"{looks[tick]['step']:,}" for tick in ticks])
            axes.yaxis.get_major_locator().set_params(integer=True)
            axes.set(xlabel="step", ylabel="layer", title=title)

    return drawn(draw, rows=3, columns=2, size=(5.5, 3), title=title)
