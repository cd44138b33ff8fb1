"""`manifest.json` of a checkpoint: its step, and the size and SHA-256 of every other file; `versions.json`.

The manifest is written last, when a checkpoint is published, and is checked before anything in the checkpoint is used.
It does not protect against somebody who changes the manifest, too. torch is not imported here.
"""

import functools
import json
import platform
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import msgspec

from megatron_fanformer import __version__
from megatron_fanformer.durable_files import regular_file, sha256_of
from megatron_fanformer.errors import CorruptError

MANIFEST = "manifest.json"
THREADS = 4  # per rank: a disk is faster than one thread
WEIGHTS_SUFFIX = ".distcp"
_RANK_SUMS = ".sums-{}.json"
REMEDY = "copy it again, or use another checkpoint"
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")
VERSIONS = "versions.json"


class FileSums(msgspec.Struct, frozen=True):
    """The size and sum of one file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The step of a checkpoint, and the size and sum of each of its files but the manifest, by name."""

    step: int
    files: dict[str, FileSums]


def write_rank_sums(folder: Path, rank: int) -> None:
    """Write the sums of a rank's tensor files into a folder, for `write_manifest`."""
    sums = {file.name: _sums_of(file) for file in folder.glob(f"__{rank}_*{WEIGHTS_SUFFIX}")}
    (folder / _RANK_SUMS.format(rank)).write_bytes(msgspec.json.encode(sums))


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of a complete checkpoint; sums that the ranks have not written are computed now."""
    sums: dict[str, FileSums] = {}
    for rank_sums in sorted(folder.glob(_RANK_SUMS.format("*"))):
        sums.update(msgspec.json.decode(rank_sums.read_bytes(), type=dict[str, FileSums]))
        rank_sums.unlink()
    for file in sorted(folder.iterdir()):
        if file.name not in sums and file.name != MANIFEST:
            sums[file.name] = _sums_of(file)
    manifest = Manifest(step, dict(sorted(sums.items())))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _sums_of(file: Path) -> FileSums:
    return FileSums(file.stat().st_size, sha256_of(file))


def write_versions(folder: Path) -> None:
    """Write the present versions into a checkpoint's folder."""
    (folder / VERSIONS).write_text(json.dumps(versions(), indent=1) + "\n")


@functools.cache  # a query of a package takes ten milliseconds
def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the packages that it writes files with, by name."""
    ours = {"python": platform.python_version(), "megatron-fanformer": __version__}
    return {**ours, **{package: metadata.version(package) for package in PACKAGES}}


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint; CorruptError where it is missing, or cannot be read."""
    path = checkpoint / MANIFEST
    try:
        content = regular_file(path).read_bytes()
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    return manifest_from(content, path)


def manifest_from(content: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest; CorruptError, which names `path`, where it is none or names files elsewhere."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    for name in manifest.files:
        if name in ("", "..", MANIFEST) or Path(name).name != name or "\0" in name:
            raise CorruptError(f"{path} names {name!r}, which is not a file in its folder; {REMEDY}")
    return manifest


def check_files(
    checkpoint: Path, manifest: Manifest, names: Container[str] | None = None, *, share: int = 0, shares: int = 1
) -> None:
    """Compare the files of these names (None: all) with the manifest, or one of so many shares of them.

    CorruptError names a file that is missing, has another size, or has changed.
    """
    files = [(checkpoint / name, file) for name, file in manifest.files.items() if names is None or name in names]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda file: _check_file(*file), files[share::shares]))


def check_small_files(checkpoint: Path) -> None:
    """Compare all files but the tensors' with the manifest; raises like `check_files`."""
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest, [name for name in manifest.files if not name.endswith(WEIGHTS_SUFFIX)])


def _check_file(path: Path, file: FileSums) -> None:
    try:
        size = regular_file(path).stat().st_size
        if size != file.bytes:
            raise CorruptError(f"{path} has {size} bytes, its manifest says {file.bytes}; {REMEDY}")
        if sha256_of(path) != file.sha256:
            raise CorruptError(f"{path} is damaged (its SHA-256 is not its manifest's); {REMEDY}")
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
