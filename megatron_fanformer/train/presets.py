"""Presets of `model.preset`: one of the paper's sizes, or the model of the checkpoint that a run starts from."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.stores import is_url

PRESET_KEY = "model.preset"
FROM_CHECKPOINT = "from-checkpoint"
OF_THE_RUN = ("seq_length", "rope_scaling")
"""Fields that a run may state beside `from-checkpoint`, or `checkpoint.load`: weights fit any length."""


def with_preset(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's plain values with all of the model's in the place of `model.preset`.

    Raises:
        InputError: there is no such preset, no checkpoint, or one of another model than `model` states beside it.
        CorruptError: the checkpoint does not say what its model is.
    """
    model = values.get("model")
    if not isinstance(model, dict) or model.get("preset") is None:
        return values
    name = model["preset"]
    if not isinstance(name, str) or name not in (*PRESETS, FROM_CHECKPOINT):
        raise InputError(f"{PRESET_KEY} is {name}; it must be one of {', '.join((*PRESETS, FROM_CHECKPOINT))}")
    stated = {key: value for key, value in model.items() if key != "preset"}
    if name == FROM_CHECKPOINT:
        checkpoint, shape = _checkpoint_and_model(values)
        if lines := list(_disagreements(stated, dataclasses.asdict(shape), "model.", checkpoint)):
            raise InputError("\n".join(lines))
    else:
        shape = PRESETS[name]
    merged = {**dataclasses.asdict(shape), **stated}
    if isinstance(stated.get("fan"), dict):
        merged["fan"] = {**dataclasses.asdict(shape.fan), **stated["fan"]}
    return {**values, "model": merged}


def _disagreements(stated: dict[str, Any], shape: dict[str, Any], prefix: str, checkpoint: str) -> Iterator[str]:
    """Yield a line for each stated field that is not the checkpoint's. Keys that no model has are refused elsewhere."""
    for name, value in stated.items():
        if f"{prefix}{name}" in (f"model.{own}" for own in OF_THE_RUN):
            continue
        if isinstance(value, dict) and isinstance(shape.get(name), dict):
            yield from _disagreements(value, shape[name], f"{prefix}{name}.", checkpoint)
        elif name in shape and value != shape[name]:
            yield (
                f"{prefix}{name} is {value}, but {PRESET_KEY} is {FROM_CHECKPOINT}, and {checkpoint} was saved with "
                f"{shape[name]}; leave it out"
            )


def _checkpoint_and_model(values: dict[str, Any]) -> tuple[str, FANformerConfig]:
    """Return what the run starts from: its own newest checkpoint once it has begun, as for `checkpoint.load`."""
    run, load = _text(values, "training", "run_dir"), _text(values, "checkpoint", "load")
    for checkpoint in reversed(run_folder.complete_checkpoints(Path(run))) if run else ():
        try:
            return str(checkpoint), run_folder.saved_model(checkpoint)
        except CorruptError:
            continue  # which the start of the run reports
    if load is None:
        raise InputError(f"{PRESET_KEY} is {FROM_CHECKPOINT}, but checkpoint.load names none; name one")
    if is_url(load):
        raise InputError(
            f"{PRESET_KEY} is {FROM_CHECKPOINT}, but checkpoint.load is on another store; state the model's fields, or "
            "copy the checkpoint here"
        )
    try:
        found = find_checkpoint(load)
    except InputError as error:
        raise InputError(f"checkpoint.load: {error} ({PRESET_KEY} is {FROM_CHECKPOINT})") from None
    return str(found), run_folder.saved_model(found)


def _text(values: dict[str, Any], section: str, name: str) -> str | None:
    """Return a field that has not been checked yet; None where it is no text, which is refused elsewhere."""
    fields = values.get(section)
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) and "\0" not in value else None
