"""`manifest.json` of a checkpoint: its step, and the size and CRC-32 of every other file in it.

It is written last, when the checkpoint is published, and checked by whatever reads the checkpoint, before anything is
used of it. Sums are taken of blocks, so that ranks share the reading of a large file, and damage is reported with its
place. A CRC-32 shows every change of up to 32 neighbouring bits, and all but one in four billion of any other; it does
not protect against somebody who changes the manifest, too.

torch is not imported here.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from isal import isal_zlib

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 26
READ_BYTES = 1 << 20
THREADS = 4  # per rank: a disk is faster than one thread
WEIGHTS_SUFFIX = ".distcp"
_RANK_SUMS = ".sums-{}.json"
REMEDY = "copy it again, or use another checkpoint"


class FileSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as it was written."""

    bytes: int
    crc32: list[str]
    """CRC-32 of each block of `block_bytes`, in eight hexadecimal digits; an empty file has one, of no bytes."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a checkpoint: its files, and what each must be."""

    step: int
    block_bytes: int
    files: dict[str, FileSums]
    """All files of the folder but the manifest, by name."""
    crc32: str
    """CRC-32 of the fields above, as `_own_sum` computes it: a damaged name may be another file's."""


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
    files = dict(sorted(sums.items()))
    manifest = Manifest(step, BLOCK_BYTES, files, _own_sum(step, BLOCK_BYTES, files))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _own_sum(step: int, block_bytes: int, files: dict[str, FileSums]) -> str:
    return f"{isal_zlib.crc32(msgspec.json.encode((step, block_bytes, files))):08x}"


def _sums_of(file: Path) -> FileSums:
    size = file.stat().st_size
    return FileSums(size, [_crc32(file, offset, length) for offset, length in _blocks_of(size, BLOCK_BYTES)])


def _blocks_of(size: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each block; one of no bytes for an empty file."""
    for offset in range(0, max(size, 1), block_bytes):
        yield offset, min(block_bytes, size - offset)


def _crc32(file: Path, offset: int, length: int) -> str:
    value, buffer = 0, memoryview(bytearray(min(length, READ_BYTES)))  # one that stays in the processor's cache
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length and (count := stream.readinto(buffer[:length])):
            value = isal_zlib.crc32(buffer[:count], value)
            length -= count
    return f"{value:08x}"


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
    """Return a manifest from its file's content; raises like `read_manifest`, and calls the file by its path."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); {REMEDY}") from error
    if manifest.crc32 != _own_sum(manifest.step, manifest.block_bytes, manifest.files):
        raise CorruptError(f"{path} is damaged (its own CRC-32 differs); {REMEDY}")
    for name, file in manifest.files.items():
        named_here = name not in ("", "..", MANIFEST) and Path(name).name == name and "\0" not in name
        blocks = manifest.block_bytes > 0 and -(-max(file.bytes, 1) // manifest.block_bytes)
        if not named_here or file.bytes < 0 or blocks != len(file.crc32):
            raise CorruptError(f"{path} is damaged in what it says of {name!r}; {REMEDY}")
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
        share, shares: every rank checks one of this many shares of the blocks.
        advance: is called with the bytes of each block that was checked.

    Raises:
        CorruptError: a file is missing, has another size, or has changed; names it, and where.
    """
    blocks = [
        (checkpoint / name, file, offset, length, crc32)
        for name, file in manifest.files.items()
        if names is None or name in names
        for (offset, length), crc32 in zip(_blocks_of(file.bytes, manifest.block_bytes), file.crc32, strict=True)
    ]
    own = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
    with ThreadPoolExecutor(THREADS) as threads:
        for length in threads.map(lambda block: _check_block(*block), own):
            advance(length)


def check_stream(place: str, pieces: Iterable[bytes], file: FileSums, block_bytes: int) -> None:
    """Compare a file that is read from elsewhere, in pieces of any size, with what its manifest says.

    Args:
        place: what to call it.

    Raises:
        CorruptError: it differs.
    """
    size, value, sums = 0, 0, list[str]()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part = rest[: block_bytes - size % block_bytes]
            value, size, rest = isal_zlib.crc32(part, value), size + len(part), rest[len(part) :]
            if size % block_bytes == 0:
                sums.append(f"{value:08x}")
                value = 0
    if size % block_bytes or not sums:
        sums.append(f"{value:08x}")
    if size != file.bytes:
        raise CorruptError(f"{place} has {size} bytes, its manifest says {file.bytes}; {REMEDY}")
    if sums != file.crc32:
        block = next(number for number, (found, sum) in enumerate(zip(sums, file.crc32, strict=True)) if found != sum)
        raise CorruptError(f"{place} is damaged after byte {block * block_bytes} (its CRC-32 differs); {REMEDY}")


def check_small_files(checkpoint: Path) -> None:
    """Compare all files but the tensors with the manifest, where there is one.

    Raises:
        CorruptError: the manifest cannot be read, or does not agree.
    """
    if (manifest := read_manifest(checkpoint)) is not None:
        check_files(checkpoint, manifest, [name for name in manifest.files if not name.endswith(WEIGHTS_SUFFIX)])


def _check_block(path: Path, file: FileSums, offset: int, length: int, crc32: str) -> int:
    """Compare a block of a file with its sum; returns the block's length."""
    try:
        size = regular_file(path).stat().st_size
        if size != file.bytes:
            raise CorruptError(f"{path} has {size} bytes, its manifest says {file.bytes}; {REMEDY}")
        found = _crc32(path, offset, length)
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
    if found != crc32:
        place = f"bytes {offset} to {offset + length}"
        raise CorruptError(f"{path} is damaged (CRC-32 of {place} is {found}, its manifest says {crc32}); {REMEDY}")
    return length
