"""What kind of thing a path is, told by names and small files alone: nothing here imports torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_fanformer.data.blends import parse_blend
from megatron_fanformer.errors import InputError

Kind = Literal["token files", "blend", "folder of token files", "run", "checkpoint", "huggingface", "reference"]

# What may follow a prefix; the longer endings first, since .json ends one of them.
ENDINGS = (".manifest.json", ".ledger.parquet", ".bin", ".idx", ".npy")
CHECKPOINTS, CHECKPOINT_METADATA = "checkpoints", "metadata.json"
CONFIG_YAML, CONFIG_JSON = "config.yaml", "config.json"


@dataclass(frozen=True)
class Target:
    """A path that was recognised."""

    kind: Kind
    path: Path
    """A run's own folder where one of its `checkpoints/` was named."""
    prefixes: tuple[str, ...] = ()
    """Of the token files that it names, where it is data."""

    @property
    def is_data(self) -> bool:
        """Whether it is token files in any form."""
        return bool(self.prefixes)


def recognise(path: str) -> Target:
    """What `path` is: a prefix of token files or one of its files, a blend file, or a folder of any known kind.

    Raises:
        InputError: none of them.
    """
    if path.startswith("@"):  # as configurations name blend files
        return _recognise_blend(Path(path[1:]))
    place = Path(path)
    if place.is_dir():
        return _recognise_folder(place)
    prefix = prefix_of(path)
    if any(Path(prefix + ending).is_file() for ending in ENDINGS):
        return Target("token files", Path(prefix), (prefix,))
    if place.is_file():
        return _recognise_blend(place)
    raise InputError(
        f"{path} is not there: name a prefix of token files or one of them, a blend file, a run, a checkpoint or an "
        "exported folder"
    )


def prefix_of(path: str) -> str:
    """The prefix that a path means: without a known ending."""
    return next((path[: -len(ending)] for ending in ENDINGS if path.endswith(ending)), path)


def _recognise_blend(file: Path) -> Target:
    """A text file that names token files, as `@FILE` in a configuration."""
    try:
        blend = parse_blend([f"@{file}"])
        prefixes = tuple(prefix for source in blend.sources for prefix in source.prefixes)
    except InputError as error:
        raise InputError(f"{file} is no token file, and no blend file either: {error}") from None
    if not all(any(Path(prefix + end).is_file() for end in ENDINGS) for prefix in prefixes):
        raise InputError(f"{file} is of no known kind: it is no token file, and names files that are not there")
    return Target("blend", file, prefixes)


def _recognise_folder(folder: Path) -> Target:
    if (folder / CHECKPOINTS).is_dir():
        return Target("run", folder)
    if (folder / CHECKPOINT_METADATA).is_file() and (folder / CONFIG_YAML).is_file():
        return Target("checkpoint", folder)
    if folder.name == CHECKPOINTS or (folder / "latest").is_file():
        return Target("run", folder.absolute().parent if folder.parent == folder else folder.parent)
    if kind := _kind_of_model(folder):
        return Target(kind, folder)
    prefixes = tuple(sorted({prefix_of(str(path)) for end in (".idx", ".npy") for path in folder.glob(f"*{end}")}))
    if prefixes:
        return Target("folder of token files", folder, prefixes)
    raise InputError(
        f"{folder} is a folder of no known kind: no run, checkpoint or export, and there are no token files in it"
    )


def _kind_of_model(folder: Path) -> Kind | None:
    """By its configuration: an export to transformers, one of the authors' checkpoints, a run yet without any."""
    stated = _read(folder / CONFIG_JSON)
    if stated.get("model_type") == "fanformer":
        return "huggingface"
    sections = _read(folder / CONFIG_YAML)
    model = sections.get("model")
    if "d_model" in {**stated, **sections, **(model if isinstance(model, dict) else {})}:
        return "reference"
    return "run" if "training" in sections else None


def _read(file: Path) -> dict[str, Any]:
    """The mapping in a small JSON or YAML file; empty where there is none."""
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
