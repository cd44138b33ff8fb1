"""A corpus that every machine has: the source files of the Python standard library, as JSON lines.

The same library gives the same bytes: documents are sorted by path, whose hash decides which of them are held out.
"""

import gzip
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError

# Test suites are left out because of their generated tables and deliberately broken files.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
HELD_OUT_PERCENT = 5
COMPRESSION_LEVEL = 6


def pack_standard_library(folder: Path, *, shards: int = 4, root: Path | None = None) -> tuple[list[Path], Path]:
    """Write the library's sources to `train-0000N.jsonl.gz` and `held-out.jsonl.gz`; return the paths of these files.

    About 5% of the sources are held out. `root` is the folder of the library, by default this interpreter's.

    Raises InputError if the library has too few source files for so many shards and a held-out part.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = list(_read_sources(root))
    held_out = [document for document in documents if _is_held_out(document["id"])]
    train = [document for document in documents if not _is_held_out(document["id"])]
    if len(train) < shards or not held_out:
        raise InputError(f"{root} holds {len(documents)} Python files, too few for {shards} shards and a held-out part")
    folder.mkdir(parents=True, exist_ok=True)
    parts = {folder / f"train-{shard:05d}.jsonl.gz": train[shard::shards] for shard in range(shards)}
    for path, part in {**parts, folder / "held-out.jsonl.gz": held_out}.items():
        lines = msgspec.json.Encoder().encode_lines(part)
        write_atomically(path, gzip.compress(lines, COMPRESSION_LEVEL, mtime=0))
    return list(parts), folder / "held-out.jsonl.gz"


def _read_sources(root: Path) -> Iterator[dict[str, str]]:
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a file in another encoding, which its first lines state; the library has few of them
        if text:
            yield {"id": path.relative_to(root).as_posix(), "text": text, "source": "python-standard-library"}


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT
