"""`manifest.json` of a checkpoint: its step, and the size and SHA-256 of every other file in it.

It is written last, when the checkpoint is published, and checked by whatever reads the checkpoint, before anything is
used of it. It does not protect against somebody who changes the manifest, too.

torch is not imported here.
"""

from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from megatron_fanformer.durable_files import regular_file, sha256_of
from megatron_fanformer.errors import CorruptError

MANIFEST = "manifest.json"
THREADS = 4  # per rank: a disk is faster than one thread
WEIGHTS_SUFFIX = ".distcp"
_RANK_SUMS = ".sums-{}.json"
REMEDY = "copy it again, or use another checkpoint"


class FileSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file as it was written."""

    bytes: int
    sha256: str = ""
    crc32: list[str] = []
    """In place of the SHA-256 until 2026-11-27, and no longer compared: tensors have a CRC-32 of their own."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a checkpoint: its step, and the size and sum of each file."""

    step: int
    files: dict[str, FileSums]
    """All files of the folder but the manifest, by name."""
    block_bytes: int = 0
    crc32: str = ""
    """Both until 2026-11-27."""

    @property
    def has_sums(self) -> bool:
        """Return whether it has a SHA-256 of each file."""
        return all(file.sha256 for file in self.files.values())


# -- writing


def write_rank_sums(folder: Path, rank: int) -> None:
    """Leave the sums of the tensors that a rank has written in a folder, for `write_manifest` there."""
    sums = {file.name: _sums_of(file) for file in folder.glob(f"__{rank}_*{WEIGHTS_SUFFIX}")}
    (folder / _RANK_SUMS.format(rank)).write_bytes(msgspec.json.encode(sums))


def write_manifest(folder: Path, step: int) -> None:
    """Add the manifest to a complete checkpoint; sums that no rank has left are taken now."""
    sums: dict[str, FileSums] = {}
    for left in sorted(folder.glob(_RANK_SUMS.format("*"))):
        sums.update(msgspec.json.decode(left.read_bytes(), type=dict[str, FileSums]))
        left.unlink()
    for file in sorted(folder.iterdir()):
        if file.name not in sums and file.name != MANIFEST:
            sums[file.name] = _sums_of(file)
    manifest = Manifest(step, dict(sorted(sums.items())))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _sums_of(file: Path) -> FileSums:
    return FileSums(file.stat().st_size, sha256_of(file))


# -- reading


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None for one that was written before there were manifests.

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
    """Return a manifest from its file's content; errors name the path.

    Raises:
        CorruptError: it cannot be read.
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
        share, shares: every rank checks one of this many shares of the files.
        advance: is called with the bytes of each file that was checked.

    Raises:
        CorruptError: a file is missing, has another size, or has changed; names it.
    """
    files = [(checkpoint / name, file) for name, file in manifest.files.items() if names is None or name in names]
    with ThreadPoolExecutor(THREADS) as threads:
        for length in threads.map(lambda file: _check_file(*file), files[share::shares]):
            advance(length)


def check_small_files(checkpoint: Path) -> None:
    """Compare all files but the tensors with the manifest, where there is one.

    Raises:
        CorruptError: the manifest cannot be read, or does not agree.
    """
    if (manifest := read_manifest(checkpoint)) is not None:
        check_files(checkpoint, manifest, [name for name in manifest.files if not name.endswith(WEIGHTS_SUFFIX)])


def _check_file(path: Path, file: FileSums) -> int:
    """Compare a file with its sum; return its length."""
    try:
        size = regular_file(path).stat().st_size
        if size != file.bytes:
            raise CorruptError(f"{path} has {size} bytes, its manifest says {file.bytes}; {REMEDY}")
        if file.sha256 and sha256_of(path) != file.sha256:
            raise CorruptError(f"{path} is damaged (its SHA-256 is not its manifest's); {REMEDY}")
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
    return size
