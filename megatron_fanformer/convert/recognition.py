"""Recognition of paths: one answer for every command, from names and small files alone.

    convert       a run, a checkpoint, a Hugging Face folder, a checkpoint of the authors or of Megatron-LM
    generate      the first three of these; chat, too
    train         a run or a checkpoint, to start from or to resume
    inspect       all of these, and token files

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
RUNNABLE: tuple[Kind, ...] = (*OURS, "hf")
"""The kinds of targets that text can be generated from."""
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

# What may follow a prefix; the longer endings first, since .json ends one of them.
ENDINGS = (".manifest.json", ".ledger.parquet", MASK_SUFFIX, ".bin", ".idx", ".npy")
CONFIG_JSON = "config.json"  # a Hugging Face folder's
MODEL_TYPE = "fanformer"  # what it calls a FANformer
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the Hugging Face hub: OWNER/MODEL
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM's checkpoints
ITERATION, RELEASE = re.compile(r"[0-9]{1,9}"), "release"  # the tracker's content
TORCH_TABLE = ".metadata"  # as in checkpoint/stored_files.py, which imports torch
OLD_MEGATRON_LM = "mp_rank_*"  # in a checkpoint of Megatron-LM's format before `torch_dist`
REFERENCE_FIELD = "d_model"  # which the authors' configurations have, and no other


@dataclass(frozen=True)
class Target:
    """A path that was recognised."""

    kind: Kind
    path: Path
    """The recognised path; a run's own folder where its `checkpoints/` was named."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the token files that it names, where it is data."""

    @property
    def is_data(self) -> bool:
        """Return whether it is token files in any form."""
        return bool(self.prefixes)


def recognise(path: str | Path, wanted: Sequence[Kind] = KINDS) -> Target:
    """Recognise a prefix of token files or one of its files, or a folder of a known kind.

    Args:
        wanted: the accepted kinds.

    Raises:
        InputError: it is of another kind, or of none; names the accepted kinds.
        CorruptError: its configuration, which alone shows the kind, cannot be read.
    """
    try:
        target = _recognise(str(path))
    except InputError as error:
        hint = ""
        if "hf" in wanted and HUB_NAME.fullmatch(str(path)) and not Path(path).parent.is_dir():
            hint = f"; download a model of the Hugging Face hub first: hf download {path} --local-dir FOLDER"
        raise InputError(f"{error}; name {_choice(wanted)}{hint}") from None
    if target.kind not in wanted:
        raise InputError(f"{path} is {DESCRIPTIONS[target.kind]}; name {_choice(wanted)}")
    return target


def checkpoint_of(target: Target) -> Path:
    """Return the folder of a target's model: its own, or the latest checkpoint of a run's or of Megatron-LM's folder.

    Raises:
        InputError: the run has no checkpoint yet, or Megatron-LM's is in a format that is not read.
        CorruptError: the latest checkpoint is not complete, or is not there.
    """
    if target.kind == "megatron-lm":
        return _iteration(target.path)
    checkpoint = run_folder.latest_checkpoint(target.path) if target.kind == "run" else target.path
    if checkpoint is None:
        raise InputError(
            f"{target.path} is a run's folder without a checkpoint yet; train it to its first one, or name another run"
        )
    return checkpoint


def find_checkpoint(path: str | Path, wanted: Sequence[Kind] = OURS) -> Path:
    """Return the folder of the model at a path; raises the errors of `recognise` and `checkpoint_of`."""
    return checkpoint_of(recognise(path, wanted))


def _iteration(folder: Path) -> Path:
    if (tracker := folder / TRACKER).is_file():
        with tracker.open("rb") as stream:
            latest = stream.read(100).decode("ascii", errors="replace").strip()
        named = folder / (f"iter_{int(latest):07d}" if ITERATION.fullmatch(latest) else latest)
        if not (ITERATION.fullmatch(latest) or latest == RELEASE) or not named.is_dir():
            raise CorruptError(f"{tracker} names {latest!r}, and there is no such checkpoint; name one of the folder's")
        folder = named
    if not (folder / run_folder.MEGATRON_METADATA).is_file():
        raise InputError(
            f"{folder} is not in Megatron-LM's format torch_dist; load it there and save it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    return folder


def prefix_of(path: str) -> str:
    """Return a path without its known ending."""
    return next((path[: -len(ending)] for ending in ENDINGS if path.endswith(ending)), path)


def _choice(kinds: Sequence[Kind]) -> str:
    *first, last = [DESCRIPTIONS[kind] for kind in kinds]
    return f"{', '.join(first)} or {last}" if first else last


def _recognise(path: str) -> Target:
    place = Path(path)
    if place.is_dir():
        return _recognise_folder(place)
    prefix = prefix_of(path)
    if any(Path(prefix + ending).is_file() for ending in ENDINGS):
        return Target("token files", Path(prefix), (prefix,))
    raise InputError(f"{place} is a file, not a folder" if place.is_file() else f"{path} does not exist")


def _recognise_folder(folder: Path) -> Target:
    if (folder / TRACKER).is_file():  # before the names in it: Megatron-LM saves into a folder of any name
        return Target("megatron-lm", folder)
    named = folder.resolve() if folder.name in ("", "..") else folder  # a checkpoint's name states its step
    if run_folder.is_checkpoint(folder):
        return Target("checkpoint", named)
    has_checkpoints = (folder / run_folder.CHECKPOINTS).is_dir()
    if not (folder / CONFIG_JSON).is_file():  # an export may hold somebody's checkpoints, and DeepSpeed's `latest`
        if has_checkpoints:
            return Target("run", folder)
        if named.name == run_folder.CHECKPOINTS or (folder / run_folder.LATEST).is_file():
            return Target("run", named.parent)
    stated, sections = (
        run_folder.read_mapping(file) if (file := folder / name).is_file() else {}
        for name in (CONFIG_JSON, run_folder.CONFIG)
    )
    model = sections.get("model")
    if stated.get("model_type") == MODEL_TYPE:
        return Target("hf", folder)
    if REFERENCE_FIELD in {**stated, **sections, **(model if isinstance(model, dict) else {})}:
        return Target("reference", folder)
    if "training" in sections or has_checkpoints:
        return Target("run", folder)
    if is_row_folder(folder):
        return Target("token files", folder, (str(folder),))
    if prefixes := {prefix_of(str(path)) for end in (".idx", ".npy") for path in folder.glob(f"*{end}")}:
        return Target("folder of token files", folder, tuple(sorted(prefixes)))
    # one checkpoint of Megatron-LM in any format; ours also have a configuration
    has_table = any((folder / name).is_file() for name in (run_folder.MEGATRON_METADATA, TORCH_TABLE))
    if run_folder.step_of(folder) is None and (has_table or any(folder.glob(OLD_MEGATRON_LM))):
        return Target("megatron-lm", folder)
    other = (
        f": its {CONFIG_JSON} has model_type {kind!r}, not {MODEL_TYPE!r}" if (kind := stated.get("model_type")) else ""
    )
    raise InputError(f"{folder} is a folder of unknown kind{other}")
