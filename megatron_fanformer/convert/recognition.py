"""Recognizes the kind of data at a path, the same for every command, from file names and small files.

    convert           a run, a checkpoint, a Hugging Face folder, a checkpoint of the authors or of Megatron-LM
    generate, chat    a run, a checkpoint, a Hugging Face folder
    train             a run or a checkpoint, to start from or to resume
    inspect           all that `convert` accepts, and token files

Nothing here imports torch, or reads weights or tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.data.chats import MASK_SUFFIX, is_row_folder
from megatron_fanformer.errors import CorruptError, InputError

Kind = Literal["token files", "folder of token files", "run", "checkpoint", "hf", "reference", "megatron-lm"]

KINDS: tuple[Kind, ...] = get_args(Kind)
OURS: tuple[Kind, ...] = ("run", "checkpoint")
RUNNABLE: tuple[Kind, ...] = (*OURS, "hf")  # the models that can generate text without conversion
MODELS: tuple[Kind, ...] = (*RUNNABLE, "reference", "megatron-lm")
DESCRIPTIONS: dict[Kind, str] = {
    "token files": "a prefix of token files (or one of them)",
    "folder of token files": "a folder of token files",
    "run": "a run's folder",
    "checkpoint": f"one checkpoint of a run ({run_folder.CHECKPOINTS}/step-…)",
    "hf": "a Hugging Face folder of a FANformer",
    "reference": "a checkpoint in the authors' format",
    "megatron-lm": "a checkpoint of Megatron-LM",
}

# Endings of token files after their common prefix. The first that matches is taken: MASK_SUFFIX comes before .bin.
ENDINGS = (".manifest.json", ".ledger.parquet", MASK_SUFFIX, ".bin", ".idx", ".npy")
CONFIG_JSON = "config.json"  # a Hugging Face folder's
MODEL_TYPE = "fanformer"  # a FANformer's model_type in it
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the Hugging Face hub: OWNER/MODEL
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM's checkpoints
ITERATION, RELEASE = re.compile(r"[0-9]{1,9}"), "release"  # the tracker's content
TORCH_TABLE = ".metadata"  # as in checkpoint/stored_files.py, which imports torch
OLD_MEGATRON_LM = "mp_rank_*"  # folders in a checkpoint of Megatron-LM's format before `torch_dist`
REFERENCE_FIELD = "d_model"  # only the authors' configurations have it


@dataclass(frozen=True)
class Target:
    """A path whose kind is known."""

    kind: Kind
    path: Path  # as stated, or the run's folder if the folder `checkpoints` of a run was stated
    prefixes: tuple[str, ...] = ()  # of the token files at the path; empty if the path holds a model

    @property
    def is_data(self) -> bool:
        """Return whether the path holds token files, in any form."""
        return bool(self.prefixes)


def recognize(path: str | Path, accepted: Sequence[Kind] = KINDS) -> Target:
    """Recognize a prefix of token files, a file of such a prefix, or a folder of a known kind.

    Raises:
        InputError: the path does not exist, or its kind is unknown or not accepted; the message has the accepted kinds.
        CorruptError: the path's configuration, which alone shows the kind, cannot be read.
    """
    try:
        target = _recognize(str(path))
    except InputError as error:
        hint = ""
        if "hf" in accepted and HUB_NAME.fullmatch(str(path)) and not Path(path).parent.is_dir():
            hint = f"; download a model of the Hugging Face hub first: hf download {path} --local-dir FOLDER"
        raise InputError(f"{error}; name {_describe_kinds(accepted)}{hint}") from None
    if target.kind not in accepted:
        raise InputError(f"{path} is {DESCRIPTIONS[target.kind]}; name {_describe_kinds(accepted)}")
    return target


def checkpoint_of(target: Target) -> Path:
    """Return the folder of a target's model: of the latest checkpoint, if the target is a run or Megatron-LM's folder.

    Raises:
        InputError: the run has no checkpoint yet, or Megatron-LM's checkpoint is not in its format torch_dist.
        CorruptError: the latest checkpoint is incomplete or missing.
    """
    if target.kind == "megatron-lm":
        return _latest_iteration(target.path)
    checkpoint = run_folder.latest_checkpoint(target.path) if target.kind == "run" else target.path
    if checkpoint is None:
        raise InputError(
            f"{target.path} is a run's folder without a checkpoint yet; train it to its first one, or name another run"
        )
    return checkpoint


def find_checkpoint(path: str | Path, accepted: Sequence[Kind] = OURS) -> Path:
    """Return the folder of the model at a path.

    Raises:
        InputError: the path holds no model of an accepted kind, or no checkpoint that can be read.
        CorruptError: the configuration cannot be read, or the latest checkpoint is incomplete or missing.
    """
    return checkpoint_of(recognize(path, accepted))


def _latest_iteration(folder: Path) -> Path:
    """Return the checkpoint that the tracker in a folder of Megatron-LM names; without a tracker, the folder itself."""
    tracker = folder / TRACKER
    if tracker.is_file():
        with tracker.open("rb") as stream:
            latest = stream.read(100).decode("ascii", errors="replace").strip()
        iteration = folder / (f"iter_{int(latest):07d}" if ITERATION.fullmatch(latest) else latest)
        if not (ITERATION.fullmatch(latest) or latest == RELEASE) or not iteration.is_dir():
            raise CorruptError(f"{tracker} names {latest!r}, and there is no such checkpoint; name one of the folder's")
        folder = iteration
    if not (folder / run_folder.MEGATRON_METADATA).is_file():
        raise InputError(
            f"{folder} is not in Megatron-LM's format torch_dist; load it there and save it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    return folder


def prefix_of(path: str) -> str:
    """Return a path without the ending of a token file, if it has one."""
    return next((path[: -len(ending)] for ending in ENDINGS if path.endswith(ending)), path)


def _describe_kinds(kinds: Sequence[Kind]) -> str:
    *first, last = [DESCRIPTIONS[kind] for kind in kinds]
    return f"{', '.join(first)} or {last}" if first else last


def _recognize(path: str) -> Target:
    if Path(path).is_dir():
        return _recognize_folder(Path(path))
    prefix = prefix_of(path)
    if any(Path(prefix + ending).is_file() for ending in ENDINGS):
        return Target("token files", Path(prefix), (prefix,))
    raise InputError(f"{path} is a file, not a folder" if Path(path).is_file() else f"{path} does not exist")


def _recognize_folder(folder: Path) -> Target:
    """Recognize a folder; the order of the checks decides where several kinds would match."""
    if (folder / TRACKER).is_file():  # checked before the folder's name: Megatron-LM may save into any folder
        return Target("megatron-lm", folder)
    named = folder.resolve() if folder.name in ("", "..") else folder  # `.` and `..` get a name
    if run_folder.is_checkpoint(folder):
        return Target("checkpoint", named)
    has_checkpoints = (folder / run_folder.CHECKPOINTS).is_dir()
    if not (folder / CONFIG_JSON).is_file():  # an export may hold another program's `checkpoints` or `latest`
        if has_checkpoints:
            return Target("run", folder)
        if named.name == run_folder.CHECKPOINTS or (folder / run_folder.LATEST).is_file():
            return Target("run", named.parent)
    config_json, config = folder / CONFIG_JSON, folder / run_folder.CONFIG
    stated = run_folder.read_mapping(config_json) if config_json.is_file() else {}
    sections = run_folder.read_mapping(config) if config.is_file() else {}
    model_type, model = stated.get("model_type"), sections.get("model")
    if model_type == MODEL_TYPE:
        return Target("hf", folder)
    if REFERENCE_FIELD in {**stated, **sections, **(model if isinstance(model, dict) else {})}:
        return Target("reference", folder)
    if "training" in sections or has_checkpoints:
        return Target("run", folder)
    if is_row_folder(folder):
        return Target("token files", folder, (str(folder),))
    if prefixes := {prefix_of(str(path)) for end in (".idx", ".npy") for path in folder.glob(f"*{end}")}:
        return Target("folder of token files", folder, tuple(sorted(prefixes)))
    # One checkpoint of Megatron-LM, in any format. Ours have a table, too, but in a folder that is named by its step.
    has_table = any((folder / name).is_file() for name in (run_folder.MEGATRON_METADATA, TORCH_TABLE))
    if run_folder.step_of(folder) is None and (has_table or any(folder.glob(OLD_MEGATRON_LM))):
        return Target("megatron-lm", folder)
    reason = f": its {CONFIG_JSON} has model_type {model_type!r}, not {MODEL_TYPE!r}" if model_type else ""
    raise InputError(f"{folder} is a folder of unknown kind{reason}")
