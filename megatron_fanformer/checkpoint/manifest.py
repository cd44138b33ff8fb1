"""A checkpoint's `manifest.json`: the step, and the size and SHA-256 of every other file.

The manifest is written last, when a checkpoint is published, and is checked before anything in the checkpoint is used.
It does not protect against somebody who changes the manifest, too. This module does not import torch.
"""

import functools
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import msgspec

from megatron_fanformer import __version__
from megatron_fanformer.durable_files import regular_file, sha256_of
from megatron_fanformer.errors import CorruptError

MANIFEST = "manifest.json"
THREADS = 4  # per rank: one thread hashes more slowly than a disk reads
WEIGHTS_SUFFIX = ".distcp"
_RANK_SUMS = ".sums-{}.json"  # with the rank's number: the sums of the files that the rank has written
REMEDY = "copy it again, or use another checkpoint"
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")
VERSIONS = "versions.json"


class FileSums(msgspec.Struct, frozen=True):
    """The size and the SHA-256 of one file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The step of a checkpoint, and the sums of its files by name; the manifest itself is not among them."""

    step: int
    files: dict[str, FileSums]


def write_rank_sums(folder: Path, rank: int) -> None:
    """Compute size and SHA-256 of the tensor files that a rank has written, and store them for `write_manifest`."""
    sums = {
        file.name: FileSums(file.stat().st_size, sha256_of(file)) for file in folder.glob(f"__{rank}_*{WEIGHTS_SUFFIX}")
    }
    (folder / _RANK_SUMS.format(rank)).write_bytes(msgspec.json.encode(sums))


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of a complete checkpoint; hash only the files that `write_rank_sums` has not hashed."""
    sums: dict[str, FileSums] = {}
    for rank_sums in sorted(folder.glob(_RANK_SUMS.format("*"))):
        sums.update(msgspec.json.decode(rank_sums.read_bytes(), type=dict[str, FileSums]))
        rank_sums.unlink()
    for file in sorted(folder.iterdir()):
        if file.name not in sums and file.name != MANIFEST:
            sums[file.name] = FileSums(file.stat().st_size, sha256_of(file))
    content = msgspec.json.encode(Manifest(step, dict(sorted(sums.items()))))
    (folder / MANIFEST).write_bytes(msgspec.json.format(content, indent=1) + b"\n")


@functools.cache  # the query of one package takes ten milliseconds
def versions() -> dict[str, str]:
    """Return the versions, by name, of Python, of this package, and of the packages that write checkpoints."""
    ours = {"python": platform.python_version(), "megatron-fanformer": __version__}
    return {**ours, **{package: metadata.version(package) for package in PACKAGES}}


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise CorruptError if it is missing or `manifest_from` refuses it."""
    path = checkpoint / MANIFEST
    try:
        content = regular_file(path).read_bytes()
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    return manifest_from(content, path)


def manifest_from(content: bytes, path: Path) -> Manifest:
    """Parse the content of the manifest `path`; raise CorruptError if it is damaged, or names a file elsewhere."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    for name in manifest.files:
        if name in ("", "..", MANIFEST) or Path(name).name != name or "\0" in name:
            raise CorruptError(f"{path} names {name!r}, which is not a file in its folder; {REMEDY}")
    return manifest


def check_files(checkpoint: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Check every `shares`-th file, from number `share` on; raise CorruptError if one is missing or changed."""
    files = [(checkpoint / name, sums) for name, sums in manifest.files.items()]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda file: _check_file(*file), files[share::shares]))  # `list` raises the threads' errors


def check_small_files(checkpoint: Path) -> None:
    """Call `check_files` for all files except those with tensors, which are large."""
    manifest = read_manifest(checkpoint)
    small = {name: sums for name, sums in manifest.files.items() if not name.endswith(WEIGHTS_SUFFIX)}
    check_files(checkpoint, Manifest(manifest.step, small))


def _check_file(path: Path, expected: FileSums) -> None:
    try:
        size = regular_file(path).stat().st_size
        if size != expected.bytes:
            raise CorruptError(f"{path} has {size} bytes, its manifest says {expected.bytes}; {REMEDY}")
        if sha256_of(path) != expected.sha256:
            raise CorruptError(f"{path} is damaged (its SHA-256 is not its manifest's); {REMEDY}")
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
