"""Versions recorded with files, and named where one cannot be read."""

import functools
import json
import platform
from importlib import metadata
from pathlib import Path

from megatron_fanformer import __version__
from megatron_fanformer.errors import CorruptError

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")
FILE = "versions.json"
"""Name of the file of versions; checkpoints from before 2026-11-23 have none."""


class UnreadableError(CorruptError):
    """A checkpoint's file made the code that reads it fail. If its sums are right, that code is of other versions."""


def versions() -> dict[str, str]:
    """Return, by name, the versions of Python, this package and those that it writes files with."""
    ours = {"python": platform.python_version(), "megatron-fanformer": __version__}
    return {**ours, **{package: _installed(package) for package in PACKAGES}}


@functools.cache  # a query takes ten milliseconds
def _installed(package: str) -> str:
    return metadata.version(package)


def write_versions(folder: Path) -> None:
    """Record the present versions in a checkpoint's folder."""
    (folder / FILE).write_text(json.dumps(versions(), indent=1) + "\n")


def reader() -> str:
    """Return the versions that read a checkpoint, as text."""
    return ", ".join(f"{name} {versions()[name]}" for name in ("torch", "megatron-core"))
