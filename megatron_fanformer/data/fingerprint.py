"""The fingerprint of a run's data: recorded in every checkpoint, and compared when the run resumes.

The digest of a training or validation set covers everything that its samples depend on: the sources in their order,
their weights, the split, and for each file the lengths of its sequences and its content. Paths and modification times
are left out, since a copy is the same data. Contents are hashed in blocks spread over each file, so that terabytes are
not read at every start; data that were prepared differently differ nearly everywhere.
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
from megatron_fanformer.data.remote_files import RemoteFile, map_in_threads, version_folder
from megatron_fanformer.data.token_files import BIN_SUFFIX
from megatron_fanformer.data.tokenizer import tokenizer_file
from megatron_fanformer.durable_files import sha256_of, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.stores import reported_as_local

# 256 KiB of each file in all. A replaced piece of the file is noticed if it is longer than 1/31 of the file.
BLOCKS = 32
BLOCK_BYTES = 1 << 13

FileFacts = tuple[int, str, str]
"""The number of tokens in a file; their type (for pairs and chats also the number of sequences and a checksum of the
lengths); and a hash of the content."""


class MixFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A later mix of a run."""

    first_step: int
    digest: str


class SetFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A training or validation set."""

    digest: str
    samples: int | None = None
    """The number of samples requested, if their order depends on it; else None."""
    stages: list[MixFingerprint] = []
    """The later mixes of training, in their order."""


class DataChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of data that `data.allow_change` allowed."""

    step: int
    """The last step with the old data."""
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
        """Return the allowed changes of the training data."""
        return [change for change in self.changes if change.name == TRAINING]

    def as_plain(self) -> dict[str, Any]:
        """Return the fingerprint as plain values for a checkpoint."""
        return dict(msgspec.to_builtins(self))


def fingerprint_from_plain(values: Any, where: Path) -> DataFingerprint | None:
    """Return the fingerprint that checkpoint `where` holds as plain `values`; None if an older version wrote none."""
    if values is None:
        return None
    try:
        return msgspec.convert(values, DataFingerprint)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where} holds no fingerprint of data ({error}); use another checkpoint") from None


def fingerprint_data(
    config: DataConfig, data: CheckedData, *, samples: int | None = None, mixes: Sequence[Mix] = ()
) -> DataFingerprint:
    """Return the fingerprint of a run's data.

    `samples` is the number of training samples, if their order depends on it; `mixes` are all of several mixes.
    """
    # The source, path, number of tokens and type of each file.
    files = [(source, *file) for source in data.sources() for file in _describe_files(config, source, data)]
    remote_files = {file.url: file for file in data.remote_files}
    paths = [path for _, path, *_ in files]
    hashes = map_in_threads(lambda path: _hash_file(path, remote_files.get(path), data.cache), paths)
    facts_by_source: dict[Source, list[FileFacts]] = {}
    for (source, _, tokens, type_name), content_hash in zip(files, hashes, strict=True):
        facts_by_source.setdefault(source, []).append((tokens, type_name, content_hash))

    def digest(blend: Blend, split: str | None = None) -> str:
        weights: list[float | None] = [None] * len(blend.sources)
        if blend.weights and len(blend.sources) > 1:  # the weight of a single source has no effect
            weights = [weight / sum(blend.weights) for weight in blend.weights]
        facts = [(facts_by_source[source], weight) for source, weight in zip(blend.sources, weights, strict=True)]
        return hashlib.sha256(json.dumps([facts, split]).encode()).hexdigest()

    later = [MixFingerprint(first_step=mix.first_step, digest=digest(mix.blend)) for mix in mixes[1:]]
    return DataFingerprint(
        train=SetFingerprint(digest=digest(data.train, config.split), samples=samples, stages=later),
        valid={name: SetFingerprint(digest=digest(blend)) for name, blend in data.valid.items()},
        tokenizer=sha256_of(tokenizer_file(config.tokenizer)) if config.tokenizer else None,
    )


def _describe_files(config: DataConfig, source: Source, data: CheckedData) -> Iterator[tuple[str, int, str]]:
    """Yield the path of each file of a source, the number of its tokens, and their type as in `FileFacts`."""
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


def _hash_file(path: str, remote: RemoteFile | None, cache: Path) -> str:
    """Return the hash of a file, as `file_fingerprint` does; the hashes of remote files are kept in the index cache."""
    if remote is None:
        return file_fingerprint(Path(path))
    cached = version_folder(cache / "fingerprints", remote.identity)
    if remote.version and cached.is_file():  # without a version, the file may have changed since it was hashed
        return cached.read_text()
    digest = _hash(remote.size, (remote.read(length, offset) for offset, length in _blocks(remote.size)))
    with reported_as_local(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, digest)
    return digest


def file_fingerprint(path: Path) -> str:
    """Return the hexadecimal hash of a file's size and of blocks spread over the file; small files are hashed fully."""
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
    """Yield the offset and the length of each block to hash in a file of `size` bytes, from beginning to end."""
    if size <= BLOCKS * BLOCK_BYTES:
        yield 0, size
        return
    for number in range(BLOCKS):
        yield (size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES


def describe_other_tokenizer(stated: Iterable[str | None], digest: str, whose: str) -> str | None:
    """Return a warning if a SHA-256 in manifests, `stated`, is not `digest`, that of the tokenizer `whose`; else None.

    Another SHA-256 is no error: an export may hold the same tokenizer in other bytes.
    """
    others = {other for other in stated if other} - {digest}
    if not others:
        return None
    return f"another tokenizer (SHA-256 {_shorten(min(others))}…) than {whose} ({_shorten(digest)}…)"


def resumed_fingerprint(
    before: DataFingerprint, present: DataFingerprint, *, step: int, allowed: Collection[str] | None, run: str
) -> DataFingerprint:
    """Return the fingerprint of a resumed run: the present one, with all changes since the run began.

    Added or removed sets are no changes, and neither are mixes that begin after the checkpoint's `step`. `allowed` has
    the names of sets that may change; None: all may. Messages call the run `run`.

    Raises:
        InputError: sets that may not change have changed; one line for each of them.
    """
    differences = list(_differences(before, present, step))
    refused = [
        f"{field} is not what the run in {run} has used so far ({difference}); change it back, or name it in"
        f" data.allow_change, as [{name}]"
        for name, field, difference in differences
        if allowed is not None and name not in allowed
    ]
    if refused:
        raise InputError("\n".join(refused))
    changes = [DataChange(step=step, name=name, what=difference) for name, _, difference in differences]
    return msgspec.structs.replace(present, changes=[*before.changes, *changes])


def _differences(before: DataFingerprint, present: DataFingerprint, step: int) -> Iterator[tuple[str, str, str]]:
    """Yield, for each set that differs, the set's name, the set's configuration field, and the difference in words."""
    sets = [(TRAINING, "data.train_data", before.train, present.train)]
    for name in sorted(before.valid.keys() & present.valid.keys()):
        sets.append((name, f"data.valid_data.{name}", before.valid[name], present.valid[name]))
    for name, field, old, new in sets:
        if old.digest != new.digest:
            yield name, field, f"other files, weights or split, {_shorten(new.digest)} for {_shorten(old.digest)}"
        elif old.samples != new.samples:
            new_size, old_size = ("one epoch" if n is None else f"{n:,} samples" for n in (new.samples, old.samples))
            reason = "past one epoch the order depends on training.train_iters × training.global_batch_size"
            yield name, field, f"the order for {new_size}, and not that for {old_size}; {reason}"
    old_mixes, new_mixes = ([mix for mix in data.train.stages if mix.first_step <= step] for data in (before, present))
    if old_mixes != new_mixes:
        yield TRAINING, "data.stages", "another stage up to the step of the checkpoint"
    if before.tokenizer and present.tokenizer and before.tokenizer != present.tokenizer:
        yield TOKENIZER, "data.tokenizer", f"SHA-256 {_shorten(present.tokenizer)} for {_shorten(before.tokenizer)}"


def _shorten(digest: str) -> str:
    return digest[:12]  # for messages
