"""A run's folder: the names in it, the publication of its checkpoints, and what their small files say.

    config.yaml                  the run's configuration
    metrics.jsonl, tensorboard/  what was logged
    checkpoints/step-00000100/   one checkpoint: megatron-core's files and the run's config.yaml
    checkpoints/latest           the name of the newest complete one

A checkpoint is written under a temporary name and renamed when it is complete; `latest` is replaced atomically. So
whatever has a checkpoint's name is complete. torch is not imported for names: it takes seconds (`saved_model` does).
"""

import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_fanformer.configuration import moved_names
from megatron_fanformer.data.tokenizer import TOKENIZER_JSON, TOKENIZER_MODEL
from megatron_fanformer.durable_files import publish, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.layout import MOVED_FIELDS

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
SAVE_REQUEST = "save"  # a file of this name in a run's folder asks the run to save
VALIDATION_LOSS = "validation_loss"  # in the metrics, the first part of a validation loss's name, before its set's
# An export's tokenizer.json is the .model rewritten: the original comes first.
TOKENIZERS = (TOKENIZER_MODEL, TOKENIZER_JSON)
MEGATRON_METADATA = "metadata.json"  # written last by megatron-core


def checkpoint_name(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """An empty folder to write a step's checkpoint into; what an interrupted save left there is removed.

    Its name is unique: the writer of a killed run may outlive it, and must not write into the next run's folder.
    """
    for left in checkpoints.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    folder = _aside(checkpoints, checkpoint_name(step))
    folder.mkdir(parents=True)
    return folder


def publish_checkpoint(
    temporary: Path,
    checkpoints: Path,
    step: int,
    config: dict[str, Any],
    keep: int | None = None,
    attachments: Sequence[Path] = (),
    remove: Callable[[Path], None] = shutil.rmtree,
) -> Path:
    """Give a complete checkpoint its name, point `latest` to it, and remove all but the `keep` newest."""
    for file in attachments:
        shutil.copy(file, temporary / attachment_name(file))
    (temporary / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    final = checkpoints / checkpoint_name(step)
    if final.exists():  # saved before by a run that was then rewound: the new one replaces it
        shutil.rmtree(final)
    publish(temporary, final)
    write_atomically(checkpoints / LATEST, final.name + "\n")
    if keep is not None:
        # later steps belong to a run that was rewound: this run neither counts nor removes them
        earlier = [folder for folder in _steps(checkpoints) if folder.name < final.name]
        for old in earlier[: max(0, len(earlier) + 1 - keep)]:
            remove(old)
    return final


def remove_in_background(checkpoint: Path) -> None:
    """Rename a checkpoint at once, and remove it in a thread: gigabytes take seconds to free."""
    aside = _aside(checkpoint.parent, checkpoint.name)
    os.rename(checkpoint, aside)
    threading.Thread(target=shutil.rmtree, args=(aside,), kwargs={"ignore_errors": True}).start()


def _aside(checkpoints: Path, name: str) -> Path:
    """A unique path that is not a checkpoint's; what is left there is removed by the next save."""
    return checkpoints / f".{name}.{uuid.uuid4().hex}.tmp"


def attachment_name(file: Path) -> str:
    """What a tokenizer's file is called in a checkpoint: by its kind, which its suffix says."""
    return f"tokenizer{file.suffix}"


def attached_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer's file in a checkpoint or an exported folder, if there is one."""
    return next((path for name in TOKENIZERS if (path := checkpoint / name).is_file()), None)


def complete_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run's folder, the oldest first."""
    return [folder for folder in _steps(run / CHECKPOINTS) if is_checkpoint(folder)]


def _steps(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.glob("step-*") if path.is_dir())


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run's folder; None if it has none.

    Raises:
        CorruptError: `latest` names a checkpoint that is missing or incomplete.
    """
    pointer = run / CHECKPOINTS / LATEST
    if not pointer.exists():
        return None
    folder = run / CHECKPOINTS / pointer.read_text().strip()
    if not is_checkpoint(folder):
        raise CorruptError(
            f"{pointer} names {folder.name}, which is not a complete checkpoint; write the name of one into it"
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint in our form."""
    return (folder / MEGATRON_METADATA).is_file() and (folder / CONFIG).is_file()


def saved_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint, under the names that its fields have now.

    Raises:
        CorruptError: it cannot be read, or states a field twice.
    """
    try:
        return moved_names(read_mapping(checkpoint / CONFIG), MOVED_FIELDS)[0]
    except InputError as error:
        raise CorruptError(f"{checkpoint / CONFIG}: {_on_one_line(error)}; use another checkpoint") from None


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a small, untrusted YAML or JSON file, as plain values.

    Raises:
        CorruptError: it cannot be read, or holds something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CorruptError(f"{file} cannot be read: {reason}; copy it again, or use another checkpoint") from error
    if not isinstance(values, dict):
        raise CorruptError(f"{file} is not a configuration, which must be a mapping of fields to values")
    return values


def saved_model(checkpoint: Path) -> FANformerConfig:
    """The shape of a checkpoint's model.

    Raises:
        CorruptError: it is not stated, cannot be read, or cannot be built.
    """
    values = saved_config(checkpoint).get("model")
    if not isinstance(values, dict):
        raise CorruptError(f"{checkpoint / CONFIG} states no model; use another checkpoint")
    try:
        return FANformerConfig.from_dict(values)
    except InputError as error:
        reasons = _on_one_line(error)
        raise CorruptError(f"{checkpoint / CONFIG} states no model ({reasons}); use another checkpoint") from None


def _on_one_line(error: InputError) -> str:
    return "; ".join(str(error).splitlines())
