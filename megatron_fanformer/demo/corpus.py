"""A corpus that every machine has: the Python standard library's own source files, as Dolma documents.

The same library gives the same bytes: documents are sorted by path, the held-out part is chosen by a hash of the path,
and the dates are those of the source files.
"""

import gzip
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError

# Test suites are left out because of their generated tables and deliberately broken files.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
HELD_OUT_PERCENT = 5
COMPRESSION_LEVEL = 6


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files that `pack_standard_library` wrote."""

    train: tuple[Path, ...]
    """The shards to train on."""
    held_out: Path
    """The shard that is never trained on."""
    train_documents: int
    held_out_documents: int


class _Source(NamedTuple):
    name: str  # path below the library's root, with forward slashes
    text: str
    modified: str  # in Dolma's form, to the millisecond, in UTC


def pack_standard_library(folder: Path, *, shards: int = 4, root: Path | None = None) -> Corpus:
    """Write the library's sources to `folder` as `train-0000N.jsonl.gz` shards and `held-out.jsonl.gz`.

    About 5% of the files are held out. `root` is the library's folder, by default this interpreter's.

    Raises:
        InputError: the library has no source files, or too few for the shards.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    sources = list(_read_sources(root))
    train = [source for source in sources if not _is_held_out(source.name)]
    held_out = [source for source in sources if _is_held_out(source.name)]
    if len(train) < shards or not held_out:
        raise InputError(f"{root} holds {len(sources)} Python files, too few for {shards} shards and a held-out part")
    added = max(source.modified for source in sources)
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"train-{shard:05d}.jsonl.gz" for shard in range(shards))
    for shard, path in enumerate(paths):
        _write_shard(path, train[shard::shards], added)
    _write_shard(folder / "held-out.jsonl.gz", held_out, added)
    return Corpus(
        train=paths,
        held_out=folder / "held-out.jsonl.gz",
        train_documents=len(train),
        held_out_documents=len(held_out),
    )


def _read_sources(root: Path) -> Iterator[_Source]:
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # another encoding, named in the file's first lines: not worth a decoder here
        if text:
            modified = datetime.fromtimestamp(int(path.stat().st_mtime), tz=timezone.utc)
            yield _Source(path.relative_to(root).as_posix(), text, modified.strftime("%Y-%m-%dT%H:%M:%S.000Z"))


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def _write_shard(path: Path, sources: Sequence[_Source], added: str) -> None:
    documents = [
        {
            "id": source.name,
            "text": source.text,
            "source": "python-standard-library",
            "added": added,
            "created": source.modified,
            "metadata": {"path": source.name, "bytes": len(source.text.encode())},
        }
        for source in sources
    ]
    write_atomically(path, gzip.compress(msgspec.json.Encoder().encode_lines(documents), COMPRESSION_LEVEL, mtime=0))
