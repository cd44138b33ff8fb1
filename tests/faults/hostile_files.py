"""Files made to hang, to fill the memory, to lead elsewhere or to be executed, each in the place of a sound one."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.convert.test_hostile import Bomb

Write = Callable[[Path], object]
"""Makes the file of a path."""

ALIASES = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip("abcdefghijklmnopqrstuvwxy", "bcdefghijklmnopqrstuvwxyz", strict=True)
)
DEEP = 100_000


def text(content: str | bytes) -> Write:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(target: str) -> Write:
    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return write


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def huge(path: Path) -> None:
    """Zeros, of which the disk holds none."""
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 1 << 42)


def bomb(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(path.parent / "marker")))


def archived_bomb(path: Path) -> None:
    torch.save({"progress": Bomb(path.parent / "marker")}, path)


def compressed_archive(path: Path) -> None:
    """As torch's, with a record of 64 MB in 64 kB: it might as well be any size."""
    stream = io.BytesIO()
    torch.save({"progress": {"step": 1, "consumed_samples": 1}}, stream)
    with zipfile.ZipFile(stream) as sound, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for record in sound.namelist():
            padding = bytes(64 << 20) if record.endswith("data.pkl") else b""
            archive.writestr(record, sound.read(record) + padding)


def spoiled(path: Path) -> None:
    """The same length, and nothing of what was there."""
    path.write_bytes(b"\xa5" * path.stat().st_size)


def claims(size: int) -> Write:
    """A pickle of bytes that end long before they say."""
    return text(b"\x80\x04\x8e" + size.to_bytes(8, "little") + b"abc.")


def changed_json(**fields: Any) -> Write:
    def write(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return write


def safetensors(header: bytes, stated: int | None = None) -> Write:
    return text((len(header) if stated is None else stated).to_bytes(8, "little") + header + bytes(64))


def tokenizer(pattern: str) -> Write:
    """The tokenizer that is there, with a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return changed_json(pre_tokenizer=split)


def index(sequences: int, documents: int) -> Write:
    """The header of an index of token files that claims so many."""

    def write(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:18] + sequences.to_bytes(8, "little") + documents.to_bytes(8, "little") + data[34:])

    return write


# In the place of what, by the kind of thing; the paths are relative to the thing.
CONFIGURATIONS: dict[str, Write] = {
    "aliases": text(ALIASES),
    "nested": text("model: " + "[" * DEEP),
    "an object": text("model: !!python/object/apply:os.system ['touch marker']"),
    "huge": huge,
}
CHECKPOINTS: dict[tuple[str, str], Write] = {
    **{("config.yaml", name): write for name, write in CONFIGURATIONS.items()},
    (".metadata", "a pickle"): bomb,
    (".metadata", "pipe"): pipe,
    (".metadata", "device"): link("/dev/zero"),
    (".metadata", "spoiled"): spoiled,
    (".metadata", "bytes without end"): claims(1 << 40),
    ("metadata.json", "another format"): changed_json(sharded_backend="zarr"),
    ("common.pt", "a pickle"): archived_bomb,
    ("common.pt", "cut short"): cut_short,
    ("common.pt", "compressed"): compressed_archive,
    ("tokenizer.json", "a link out of it"): link("/etc/hostname"),
}
# Nothing of the tensors is read to describe them.
TENSORS: dict[tuple[str, str], Write] = {("*.distcp", "cut short"): cut_short, ("*.distcp", "spoiled"): spoiled}
EXPORTS: dict[tuple[str, str], Write] = {
    ("config.json", "nested"): text("[" * DEEP),
    ("config.json", "layers"): changed_json(num_hidden_layers=10**12),
    ("model.safetensors", "a header without end"): safetensors(b"{}", 1 << 62),
    ("model.safetensors", "an exabyte"): safetensors(
        b'{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}'
    ),
    ("model.safetensors", "pipe"): pipe,
}
TOKENS: dict[tuple[str, str], Write] = {
    ("tokens.idx", "counts"): index(1 << 60, 1 << 60),
    ("tokens.manifest.json", "nested"): text("[" * DEEP),
}
TOKENIZERS: dict[tuple[str, str], Write] = {
    ("tokenizer.json", "regular expression without end"): tokenizer("(a|aa)+$"),
    ("tokenizer.json", "nested"): text("[" * DEEP),
    ("tokenizer.model", "binary"): text(os.urandom(3_000)),
}
