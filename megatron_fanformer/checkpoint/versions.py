"""Versions recorded with files, which distinguish a damaged checkpoint from one of other versions."""

import functools
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from megatron_fanformer import __version__
from megatron_fanformer.checkpoint.manifest import read_manifest
from megatron_fanformer.configuration import read_plain_values
from megatron_fanformer.errors import CorruptError, FanformerError

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")
FILE = "versions.json"
"""Name of the file of versions; checkpoints from before 2026-11-23 have none."""


class UnreadableError(CorruptError):
    """A checkpoint's file made the code that reads it fail: it is damaged, unless its sums say otherwise."""


class OtherVersions(FanformerError):
    """An intact checkpoint that the versions installed here cannot read."""


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


@contextmanager
def blaming_other_versions(checkpoint: Path) -> Iterator[None]:
    """Wrap reading a checkpoint whose files have been held against its manifest.

    Raises:
        OtherVersions: in place of an `UnreadableError`, where there is a manifest: no byte has changed.
    """
    try:
        yield
    except UnreadableError as error:
        if read_manifest(checkpoint) is None:
            raise
        cause = error.__cause__ or error
        raise OtherVersions(
            f"{checkpoint} is as it was written, with {_written_with(checkpoint)}, and cannot be read with "
            f"{_named(versions())} ({type(cause).__name__}: {' '.join(str(cause).split())}); nothing is lost: read it "
            "with the versions that wrote it, or with later ones"
        ) from error


def _written_with(checkpoint: Path) -> str:
    try:
        found = read_plain_values(checkpoint / FILE)
    except (OSError, ValueError):
        found = None
    return _named(found) if isinstance(found, dict) else "versions that it does not state"


def _named(found: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "megatron-core", "python") if name in found)
