"""The fingerprint of a run's data: recorded in every checkpoint, and compared when the run resumes.

The digest of a set is of all that its samples depend on: the sources in their order, their weights, the split, and of
each file the lengths of its sequences and its content. Paths and times of change are not part of it: a copy is the
same data. Contents are sampled in blocks spread over each file, first and last included, so that terabytes are not
read at every start; data that were prepared differently differ nearly everywhere.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.data.blends import Blend, Source
from megatron_fanformer.data.chats import open_chats
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.config import TOKENIZER, TRAINING, DataConfig
from megatron_fanformer.data.mixes import Mix
from megatron_fanformer.data.remote_files import RemoteFile, folder_of, side_by_side
from megatron_fanformer.data.token_files import BIN_SUFFIX
from megatron_fanformer.data.tokenizer import tokenizer_file
from megatron_fanformer.durable_files import sha256_of, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.stores import reported_as_local

# 256 KiB in all of each file. What is replaced in one piece is noticed from 1/31 of the file on.
BLOCKS = 32
BLOCK_BYTES = 1 << 13
SHOWN_DIGITS = 12  # of a digest

FileFacts = tuple[int, str, str]
"""Tokens of a file; their type, of a pair also the number of its sequences and a checksum of their lengths; and a hash
of the content."""


class MixFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A later mix of a run."""

    first_step: int
    digest: str


class SetFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A training or validation set."""

    digest: str
    samples: int | None = None
    """The number of samples requested, where their order depends on it."""
    stages: list[MixFingerprint] = []
    """The later mixes of training, in their order."""


class DataChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of data that `data.allow_change` allowed."""

    step: int
    """The step after which it was made."""
    name: str
    what: str


class DataFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a run."""

    train: SetFingerprint
    valid: dict[str, SetFingerprint] = {}
    tokenizer: str | None = None
    """SHA-256 of the file that `data.tokenizer` names."""
    changes: list[DataChange] = []
    """The changes allowed so far, the earliest first."""

    @property
    def training_changes(self) -> list[DataChange]:
        """Return the changes of the training data."""
        return [change for change in self.changes if change.name == TRAINING]

    def as_plain(self) -> dict[str, Any]:
        """Return it as a checkpoint holds it."""
        return dict(msgspec.to_builtins(self))


def fingerprint_from_plain(values: Any, where: Path) -> DataFingerprint | None:
    """Return the fingerprint in a checkpoint, `where`; None for a checkpoint of a version that recorded none."""
    if values is None:
        return None
    try:
        return msgspec.convert(values, DataFingerprint)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where} holds no fingerprint of data ({error}); use another checkpoint") from None


def fingerprint_data(
    config: DataConfig, data: CheckedData, *, samples: int | None = None, mixes: Sequence[Mix] = ()
) -> DataFingerprint:
    """Return the fingerprint of a run's data; `samples` and `mixes` (none: one) as `SetFingerprint` has them."""
    paths = [(source, facts) for source in data.sources() for facts in _file_facts(config, source, data)]
    remote = {file.url: file for file in data.remote_files}
    contents = side_by_side(
        lambda path: _content(path, remote.get(path), data.cache), [path for _, (path, *_) in paths]
    )
    files: dict[Source, list[FileFacts]] = {}
    for (source, (_, tokens, form)), content in zip(paths, contents, strict=True):
        files.setdefault(source, []).append((tokens, form, content))

    def digest(blend: Blend, split: str | None = None) -> str:
        weights: list[float | None] = [None] * len(blend.sources)
        if blend.weights and len(blend.sources) > 1:  # the weight of one alone does not count
            weights = [weight / sum(blend.weights) for weight in blend.weights]
        facts = [(files[source], weight) for source, weight in zip(blend.sources, weights, strict=True)]
        return hashlib.sha256(json.dumps([facts, split]).encode()).hexdigest()

    later = [MixFingerprint(first_step=mix.first_step, digest=digest(mix.blend)) for mix in mixes[1:]]
    return DataFingerprint(
        train=SetFingerprint(digest=digest(data.train, config.split), samples=samples, stages=later),
        valid={name: SetFingerprint(digest=digest(blend)) for name, blend in data.valid.items()},
        tokenizer=sha256_of(tokenizer_file(config.tokenizer)) if config.tokenizer else None,
    )


def _file_facts(config: DataConfig, source: Source, data: CheckedData) -> Iterator[tuple[str, int, str]]:
    """Yield the path of each file of a source that holds tokens, their number, and its form (see `FileFacts`)."""
    if config.is_chats:
        chats = open_chats(source.paths[0])
        tokens, checksum = int(chats.lengths.sum()), zlib.crc32(chats.lengths.tobytes())
        yield str(chats.ids_path), tokens, f"{chats.dtype} {len(chats)} {tokens} {checksum:08x}"
        yield str(chats.mask_path), tokens, "mask"
    elif source.is_npy:
        for file in data.files(source):
            yield file.path, file.tokens, file.dtype.str
    else:
        pair = data.pair(source)
        yield source.paths[0] + BIN_SUFFIX, pair.tokens, pair.identity


def _content(path: str, remote: RemoteFile | None, cache: Path) -> str:
    """Return `file_fingerprint` of a file; that of one on another store is remembered in the index cache."""
    if remote is None:
        return file_fingerprint(Path(path))
    note = folder_of(cache / "fingerprints", remote.identity)
    if remote.version and note.is_file():
        return note.read_text()
    digest = _hash(remote.size, (remote.read(length, offset) for offset, length in _blocks(remote.size)))
    with reported_as_local(note):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, digest)
    return digest


def file_fingerprint(path: Path) -> str:
    """Return the hexadecimal hash of a file's size and of blocks spread over it; of every byte if it is small."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return _hash(size, (os.pread(stream.fileno(), length, offset) for offset, length in _blocks(size)))
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); copy it again") from error


def _hash(size: int, blocks: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each block of a file."""
    if size <= BLOCKS * BLOCK_BYTES:
        yield 0, size
        return
    for number in range(BLOCKS):
        yield (size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES


def another_tokenizer(stated: Iterable[str | None], digest: str, whose: str) -> str | None:
    """Describe the tokenizer that made tokens, by the SHA-256 that manifests state; None where it is `whose`, `digest`.

    It is a reason for a warning, not for an error: an export's tokenizer may be the same one, written anew.
    """
    others = {other for other in stated if other} - {digest}
    return f"another tokenizer (SHA-256 {_short(min(others))}…) than {whose} ({_short(digest)}…)" if others else None


def resumed_fingerprint(
    before: DataFingerprint, present: DataFingerprint, *, step: int, allowed: Collection[str] | None, run: str
) -> DataFingerprint:
    """Return the fingerprint of the data of a run that resumes: the present one, with all changes so far.

    Sets that are added or left out are no change, nor are mixes that the run has not come to at the checkpoint's
    `step`. `allowed` are the names of sets that may change (None: all may); `run` is the run's name in messages.

    Raises:
        InputError: other sets have changed, one line each.
    """
    differences = list(_differences(before, present, step))
    refused = [
        f"{field} is not what the run in {run} has used so far ({what}); change it back, or name it in"
        f" data.allow_change, as [{name}]"
        for name, field, what in differences
        if allowed is not None and name not in allowed
    ]
    if refused:
        raise InputError("\n".join(refused))
    changes = [DataChange(step=step, name=name, what=what) for name, _, what in differences]
    return msgspec.structs.replace(present, changes=[*before.changes, *changes])


def _differences(before: DataFingerprint, present: DataFingerprint, step: int) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each set in both that differs, its field in the configuration, and how it differs."""
    names = sorted(before.valid.keys() & present.valid.keys())
    valid = ((name, f"data.valid_data.{name}", before.valid[name], present.valid[name]) for name in names)
    for name, field, old, new in ((TRAINING, "data.train_data", before.train, present.train), *valid):
        if old.digest != new.digest:
            yield name, field, f"other files, weights or split, {_short(new.digest)} for {_short(old.digest)}"
        elif old.samples != new.samples:
            counts = ["one epoch" if one.samples is None else f"{one.samples:,} samples" for one in (new, old)]
            reason = "past one epoch it depends on training.train_iters × training.global_batch_size"
            yield name, field, f"the order for {counts[0]} for that for {counts[1]}; {reason}"
    old_mixes, new_mixes = ([mix for mix in one.train.stages if mix.first_step <= step] for one in (before, present))
    if old_mixes != new_mixes:
        yield TRAINING, "data.stages", "another stage up to the step of the checkpoint"
    if before.tokenizer and present.tokenizer and before.tokenizer != present.tokenizer:
        yield TOKENIZER, "data.tokenizer", f"SHA-256 {_short(present.tokenizer)} for {_short(before.tokenizer)}"


def _short(digest: str) -> str:
    return digest[:SHOWN_DIGITS]
