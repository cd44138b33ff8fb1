"""A run's folder: names of files, publication of checkpoints, the choice among them, and reading of small files.

    config.yaml                  the run's configuration
    metrics.jsonl, tensorboard/  its metrics
    recovery.jsonl               its recoveries from damage and bad numbers, if there were any
    run.lock                     the process that writes into the folder (run_lock.py)
    loaded/                      a checkpoint of another store that the run starts from
    checkpoints/step-00000100/   one checkpoint: megatron-core's files, the run's config.yaml, and a manifest
    checkpoints/latest           the name of the newest complete checkpoint
    checkpoints/damaged-…/       a checkpoint that failed its verification and was set aside

A checkpoint is written under a temporary name and renamed when it is complete; `latest` is replaced atomically; an old
checkpoint is renamed before it is removed. So every folder with a checkpoint's name is complete. This module does not
import torch, which takes seconds.
"""

import json
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_fanformer.checkpoint.manifest import MANIFEST, VERSIONS, check_small_files, versions, write_manifest
from megatron_fanformer.configuration import read_plain_values, rename_moved_fields
from megatron_fanformer.data.tokenizer import TOKENIZER_JSON, TOKENIZER_MODEL
from megatron_fanformer.durable_files import publish, regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError, broken_fields
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.layout import MOVED_FIELDS
from megatron_fanformer.stores import is_url, url_problem

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
RECOVERY = "recovery.jsonl"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
LOCK = "run.lock"
LOADED = "loaded"
SAVE_FILE = "save"  # creating this file in a run's folder makes the run save
TRACES = "traces"  # folder for the profiles of steps
VALIDATION_LOSS = "validation_loss"  # a metric's name is validation_loss/SET
# If both are present, the first is the original: an export converts a tokenizer.model to a tokenizer.json.
TOKENIZERS = (TOKENIZER_MODEL, TOKENIZER_JSON)
MEGATRON_METADATA = "metadata.json"  # written last by megatron-core
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,20})")
_LATEST_REMEDY = "write the name of a complete checkpoint into it"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The section `checkpoint` of a run's configuration: how it saves, and where it starts from."""

    save_interval: int | None = None
    """Steps between checkpoints; null: at the end only."""
    keep: int | None = None
    """Number of the newest checkpoints to keep; null: all."""
    async_save: bool = False
    """Continue training during a save."""
    load: str | None = None
    """Folder or URL of a run or a checkpoint, with whose weights a new run starts (step 0, fresh optimizer)."""
    mirror: str | None = None
    """URL of a folder on another store, such as s3://bucket/run, to which checkpoints are copied
    (docs/checkpoints-and-conversion.md#another-store)."""
    mirror_keep: int | None = None
    """Number of the newest checkpoints to keep on the mirror; null: all."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        names = ("save_interval", "keep", "mirror_keep")
        problems = broken_fields("checkpoint", self, "be at least 1, or null", lambda value: value < 1, *names)
        urls = {"mirror": self.mirror, "load": self.load if self.load and is_url(self.load) else None}  # else a path
        problems += filter(None, (url_problem(f"checkpoint.{name}", url) for name, url in urls.items()))
        return problems


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if the name is not a checkpoint's."""
    match = _CHECKPOINT_NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Make an empty folder for the files of a step's checkpoint, and remove folders of interrupted saves and removals.

    The folder's name is unique: the writer of a killed run may outlive the run, and must not write into this folder.
    """
    for leftover in checkpoints.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = _hidden_path(checkpoints, checkpoint_name(step))
    folder.mkdir(parents=True)
    return folder


def publish_checkpoint(
    checkpoints: Path,
    step: int,
    temporary: Path,
    config: dict[str, Any],
    attachments: Mapping[str, bytes] | None = None,
    *,
    keep: int | None = None,
    in_use: Collection[str] = (),
) -> Path:
    """Complete a checkpoint, rename it to its final name, point `latest` to it, and remove old checkpoints.

    Args:
        temporary: the folder with megatron-core's files of the checkpoint.
        config: the run's configuration.
        attachments: the content of further small files, by name.
        keep: the number of the newest checkpoints to keep; None: all.
        in_use: names of old checkpoints that must not be removed yet.
    """
    for name, content in (attachments or {}).items():
        (temporary / name).write_bytes(content)
    (temporary / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    (temporary / VERSIONS).write_text(json.dumps(versions(), indent=1) + "\n")
    write_manifest(temporary, step)
    final = checkpoints / checkpoint_name(step)
    if os.path.lexists(final):  # left from before the run was rewound: the new checkpoint replaces it
        _remove(final)
    publish(temporary, final)
    write_atomically(checkpoints / LATEST, final.name + "\n")
    if keep is not None:
        # Later checkpoints are left from before the run was rewound: they are neither counted nor removed.
        earlier = [folder for folder in _step_folders(checkpoints) if folder.name < final.name]
        for old in earlier[: max(0, len(earlier) + 1 - keep)]:  # 1: the new checkpoint counts, too
            if old.name not in in_use:
                _remove(old)
    return final


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint, which would look complete while half removed; remove it in a thread: that takes seconds."""
    aside = _hidden_path(checkpoint.parent, checkpoint.name)
    os.rename(checkpoint, aside)
    threading.Thread(target=shutil.rmtree, args=(aside,), kwargs={"ignore_errors": True}).start()


def _hidden_path(checkpoints: Path, name: str) -> Path:
    """Return a unique path that no reader takes for a checkpoint; the next save removes a folder left at it."""
    return checkpoints / f".{name}.{uuid.uuid4().hex}.tmp"


def point_to(checkpoint: Path, damaged: Sequence[Path]) -> None:
    """Set damaged checkpoints aside, and make `latest` name a checkpoint; write nothing if nothing would change."""
    latest = checkpoint.parent / LATEST
    with suppress(CorruptError):  # a damaged `latest` is replaced below
        if not damaged and _read_latest(latest) == checkpoint:
            return
    for other in damaged:
        set_aside(other)
    write_atomically(latest, checkpoint.name + "\n")


def set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint, so that no reader takes it for a checkpoint any more."""
    name = f"damaged-{damaged.name}"
    num_earlier = sum(1 for _ in damaged.parent.glob(f"{name}*"))
    os.rename(damaged, damaged.with_name(f"{name}-{num_earlier + 1}" if num_earlier else name))


def attached_tokenizer(checkpoint: Path) -> Path | None:
    """Return the tokenizer's file in a checkpoint or an exported folder; None if there is none.

    Raises CorruptError for a link out of a checkpoint. Links of an export are allowed: Hugging Face's cache has them.
    """
    file = next((path for name in TOKENIZERS if (path := checkpoint / name).is_file()), None)
    if file and is_checkpoint(checkpoint) and file.resolve().parent != checkpoint.resolve():
        raise CorruptError(f"{file} is a link out of its checkpoint, to {file.resolve()}; put the file itself there")
    return file


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run's folder, the oldest first."""
    return [folder for folder in _step_folders(run / CHECKPOINTS) if is_checkpoint(folder)]


def newest_steps(run: Path) -> tuple[int, int]:
    """Return the steps of the newest checkpoint and of the newest that passes `check_sound`; −1 if there is none."""
    checkpoints = {step_of(folder) or 0: folder for folder in reversed(_step_folders(run / CHECKPOINTS))}
    newest = max(checkpoints, default=-1)
    for step, checkpoint in checkpoints.items():
        with suppress(CorruptError):
            check_sound(checkpoint)
            return newest, step
    return newest, -1


def _step_folders(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.glob("step-*") if step_of(path) is not None and path.is_dir())


def latest_checkpoint(run: Path) -> Path | None:
    """Return the first of `checkpoints_to_resume`, or None; raise CorruptError if that checkpoint is not complete."""
    candidates = checkpoints_to_resume(run)
    if not candidates:
        return None
    check_complete(candidates[0])
    return candidates[0]


def checkpoints_to_resume(run: Path) -> list[Path]:
    """Return the checkpoints to resume from, sound or not, in the order in which to try them.

    The checkpoint that `latest` names comes first, then the earlier ones. If `latest` is damaged, all checkpoints are
    returned, the newest first. Raises CorruptError if there is a `latest`, but no checkpoint.
    """
    latest = run / CHECKPOINTS / LATEST
    newest_first = _step_folders(run / CHECKPOINTS)[::-1]
    if not newest_first and not os.path.lexists(latest):
        return []
    try:
        first = _read_latest(latest)
    except CorruptError as error:
        if not newest_first:
            raise
        logger.warning("%s; the newest checkpoint there that is sound is taken", str(error).partition("; ")[0])
        return newest_first
    return [checkpoint for checkpoint in newest_first if checkpoint.name <= first.name]


def _read_latest(latest: Path) -> Path:
    """Return the checkpoint that a file `latest` names; raise CorruptError if it names none."""
    try:
        name = regular_file(latest).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({error})" if os.path.lexists(latest) else "is missing"
        raise CorruptError(f"{latest} {reason}; {_LATEST_REMEDY}") from None
    checkpoint = latest.parent / name
    # The name is matched first: a file system raises an error for some texts as a path.
    if not _CHECKPOINT_NAME.fullmatch(name) or not checkpoint.is_dir():
        raise CorruptError(f"{latest} names {name!r}, which is not a checkpoint; {_LATEST_REMEDY}")
    return checkpoint


def check_complete(checkpoint: Path) -> None:
    """Raise CorruptError if a checkpoint lacks its configuration, its manifest or megatron-core's metadata."""
    for name in (CONFIG, MEGATRON_METADATA, MANIFEST):
        if not (checkpoint / name).is_file():
            raise CorruptError(f"{checkpoint} is not complete: {name} is missing; copy it again, or use another")


def check_sound(checkpoint: Path) -> None:
    """Raise CorruptError if a file of a checkpoint is missing or damaged; files of tensors are not read."""
    check_complete(checkpoint)
    check_small_files(checkpoint)
    saved_config(checkpoint)  # only to find damage in it


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint that this package wrote."""
    return (folder / MEGATRON_METADATA).is_file() and (folder / CONFIG).is_file()


def saved_config(checkpoint: Path) -> dict[str, Any]:
    """Return the configuration of the run that wrote a checkpoint; renamed fields have their present names."""
    file = checkpoint / CONFIG
    values = read_mapping(file)
    for name, section in values.items():
        if not isinstance(section, dict):
            raise CorruptError(f"{file}: {name!r:.40} is not a mapping of fields to values; use another checkpoint")
    return rename_moved_fields(values, MOVED_FIELDS)[0]  # [1]: the former names


def metrics_entry(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl or recovery.jsonl; return None if it has no step."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a small, untrusted YAML or JSON file; raise CorruptError if the file holds no mapping."""
    try:
        values = read_plain_values(file)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CorruptError(f"{file} cannot be read: {reason}; copy it again, or use another checkpoint") from error
    if not isinstance(values, dict):
        raise CorruptError(f"{file} is not a mapping of fields to values; copy it again, or use another checkpoint")
    return values


def saved_model(checkpoint: Path) -> FANformerConfig:
    """Return the configuration of a checkpoint's model; raise CorruptError if there is none, or an impossible one."""
    values = saved_config(checkpoint).get("model")
    if not isinstance(values, dict):
        raise CorruptError(f"{checkpoint / CONFIG} states no model; use another checkpoint")
    try:
        return FANformerConfig.from_dict(values)
    except InputError as error:
        reasons = "; ".join(str(error).splitlines())
        raise CorruptError(f"{checkpoint / CONFIG} states no model ({reasons}); use another checkpoint") from None
