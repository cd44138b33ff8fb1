"""`manifest.json` of a checkpoint: its step, and the size and SHA-256 of every other file; `versions.json`.

The manifest is written last, when a checkpoint is published, and is checked before anything in the checkpoint is used.
It does not protect against somebody who changes the manifest, too. torch is not imported here.
"""

import functools
import json
import platform
from collections.abc import Callable, Container
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
VERSIONS = "versions.json"  # checkpoints from before 2026-11-23 have none


class FileSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The size and sum of one file."""

    bytes: int
    sha256: str = ""
    crc32: list[str] = []
    """Written instead of the SHA-256 until 2026-11-27; no longer compared, since tensors have a CRC-32 of their own."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The step of a checkpoint, and the size and sum of each of its files."""

    step: int
    files: dict[str, FileSums]
    """All files of the folder but the manifest, by name."""
    block_bytes: int = 0
    crc32: str = ""
    """Both written until 2026-11-27; unused."""

    @property
    def has_sums(self) -> bool:
        """Return True if every file has a SHA-256."""
        return all(file.sha256 for file in self.files.values())


# -- writing


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


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the packages that it writes files with, by name."""
    ours = {"python": platform.python_version(), "megatron-fanformer": __version__}
    return {**ours, **{package: _installed(package) for package in PACKAGES}}


@functools.cache  # a query takes ten milliseconds
def _installed(package: str) -> str:
    return metadata.version(package)


# -- reading


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None where it has none, as the earliest ones.

    Raises:
        CorruptError: it cannot be read.
    """
    path = checkpoint / MANIFEST
    try:
        content = regular_file(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    return manifest_from(content, path)


def manifest_from(content: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest; errors name `path`.

    Raises:
        CorruptError: it cannot be read, or names files elsewhere.
    """
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    for name in manifest.files:
        if name in ("", "..", MANIFEST) or Path(name).name != name or "\0" in name:
            raise CorruptError(f"{path} names {name!r}, which is not a file in its folder; {REMEDY}")
    return manifest


def check_files(
    checkpoint: Path,
    manifest: Manifest,
    names: Container[str] | None = None,
    *,
    share: int = 0,
    shares: int = 1,
    advance: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        names: of the files; None: all.
        share, shares: check one of this many shares of the files.
        advance: is called with the bytes of each checked file.

    Raises:
        CorruptError: a file is missing, has another size, or has changed; names it.
    """
    files = [(checkpoint / name, file) for name, file in manifest.files.items() if names is None or name in names]
    with ThreadPoolExecutor(THREADS) as threads:
        for length in threads.map(lambda file: _check_file(*file), files[share::shares]):
            advance(length)


def check_small_files(checkpoint: Path) -> None:
    """Compare all files but the tensors' with the manifest, if there is one.

    Raises:
        CorruptError: the manifest cannot be read, or a file is missing or has changed.
    """
    if (manifest := read_manifest(checkpoint)) is not None:
        check_files(checkpoint, manifest, [name for name in manifest.files if not name.endswith(WEIGHTS_SUFFIX)])


def _check_file(path: Path, file: FileSums) -> int:
    """Compare a file with its size and sum; return its bytes."""
    try:
        size = regular_file(path).stat().st_size
        if size != file.bytes:
            raise CorruptError(f"{path} has {size} bytes, its manifest says {file.bytes}; {REMEDY}")
        if file.sha256 and sha256_of(path) != file.sha256:
            raise CorruptError(f"{path} is damaged (its SHA-256 is not its manifest's); {REMEDY}")
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
    return size
