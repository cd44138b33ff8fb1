"""Identity of a run's training data: recorded in every checkpoint, and compared when the run resumes.

A set is identified by what its samples depend on: the sources in their order, their weights, the split, and of each
file the lengths of its sequences and its content. Where the files are, and when they were written, is not part of it:
a copy is the same data. Contents are identified by blocks spread over each file, first and last included, so that
terabytes are not read at every start; data that were prepared differently differ nearly everywhere. A few bytes
changed in between show only in the manifest's SHA-256, which is compared where there is one.
"""

import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.data.blends import Blend, Source
from megatron_fanformer.data.config import TOKENIZER, TRAINING, DataConfig
from megatron_fanformer.data.manifest import manifest_of
from megatron_fanformer.data.notes import remembered
from megatron_fanformer.data.npy_files import npy_prefix
from megatron_fanformer.data.remote_files import Range, RemoteFile, read_ranges
from megatron_fanformer.data.stages import Stage
from megatron_fanformer.data.survey import DataSurvey
from megatron_fanformer.data.token_files import BIN_SUFFIX
from megatron_fanformer.data.tokenizer import tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, InputError, redacted

# 256 KiB in all of each file. What is replaced in one piece is noticed from 1/31 of the file on.
BLOCKS = 32
BLOCK_BYTES = 1 << 13
# Blocks of a cold file on a shared file system take milliseconds each, in which others can be waited for.
THREADS = 16
FILES_AT_ONCE = 64  # on other stores: 16 MiB of blocks
SHOWN_DIGITS = 12  # of a fingerprint


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what identifies data. Unknown fields are left out: a later version may record more."""


class FileIdentity(_Part, frozen=True, kw_only=True):
    """A pair, or a .npy file."""

    path: str
    """The path as it was named; a pair's prefix. Not compared."""
    tokens: int
    form: str
    """The type of the tokens; for a pair also the number of its sequences and a checksum of their lengths."""
    content: str
    """A fingerprint of the .bin or .npy file."""
    sha256: str | None = None
    """SHA-256 of that file, by its manifest; None: it has none."""
    tokenizer: str | None = None
    """SHA-256 of the tokenizer that made the tokens, by the manifest."""


class SourceIdentity(_Part, frozen=True, kw_only=True):
    """One source of a blend."""

    files: list[FileIdentity]
    weight: float | None = None
    """Its share of the sum of weights; None: the blend has none."""


class StageIdentity(_Part, frozen=True, kw_only=True):
    """A later stage of a run, with a mix of its own."""

    first_step: int
    sources: list[SourceIdentity]

    @property
    def files(self) -> list[FileIdentity]:
        """Return the files of all sources, in their order."""
        return [file for source in self.sources for file in source.files]


class SetIdentity(_Part, frozen=True, kw_only=True):
    """A training or validation set."""

    sources: list[SourceIdentity]
    split: str | None = None
    """How the documents are cut into training and validation, where they are."""
    samples: int | None = None
    """The number of samples requested, where their order depends on it."""
    stages: list[StageIdentity] = []
    """The later stages of training, in their order."""

    @property
    def files(self) -> list[FileIdentity]:
        """Return the files of all sources, in their order."""
        return [file for source in self.sources for file in source.files]


Mix = SetIdentity | StageIdentity


class DataChange(_Part, frozen=True, kw_only=True):
    """A change of data that `data.allow_change` allowed."""

    step: int
    """The step after which it was made."""
    name: str
    what: str


class DataIdentity(_Part, frozen=True, kw_only=True):
    """The data of a run."""

    train: SetIdentity
    valid: dict[str, SetIdentity] = {}
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
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def identity_from_plain(values: Any, where: Path) -> DataIdentity | None:
    """Return the identity in a checkpoint; None for a checkpoint of a version that recorded none.

    Raises:
        CorruptError: it is not one; names the file `where`.
    """
    if values is None:
        return None
    try:
        return msgspec.convert(values, DataIdentity)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where} holds no identity of data ({error}); use another checkpoint") from None


def identify_data(
    config: DataConfig, survey: DataSurvey, *, samples: int | None = None, stages: Sequence[Stage] = ()
) -> DataIdentity:
    """Identify the data of a run by the files that `survey` found.

    Args:
        stages: of the run, in their order; none: it has one.
        samples: the number of training samples requested, where their order depends on it.

    Raises:
        InputError, CorruptError: a file, a manifest or the tokenizer cannot be read.
    """
    sources = survey.sources()
    surveyed = {source: list(_surveyed(source, survey)) for source in sources}
    remote = _remote_fingerprints(survey)
    with ThreadPoolExecutor(THREADS) as threads:
        identified = threads.map(lambda file: _identify(remote, *file), itertools.chain(*surveyed.values()))
        files = {source: [next(identified) for _ in own] for source, own in surveyed.items()}
    return DataIdentity(
        train=SetIdentity(
            sources=_sources(survey.train, files),
            split=config.applied_split,
            samples=samples,
            stages=[
                StageIdentity(first_step=stage.first_step, sources=_sources(stage.blend, files)) for stage in stages[1:]
            ],
        ),
        valid={name: SetIdentity(sources=_sources(blend, files)) for name, blend in survey.valid.items()},
        tokenizer=sha256_of(tokenizer_file(config.tokenizer)) if config.tokenizer else None,
    )


def _sources(blend: Blend, files: dict[Source, list[FileIdentity]]) -> list[SourceIdentity]:
    total = sum(blend.weights or ())
    weights = [weight / total for weight in blend.weights] if blend.weights else [None] * len(blend.sources)
    return [
        SourceIdentity(files=files[source], weight=weight)
        for source, weight in zip(blend.sources, weights, strict=True)
    ]


def _surveyed(source: Source, survey: DataSurvey) -> Iterator[tuple[str, str, str, int, str]]:
    """Yield path as it was named, prefix, suffix of the tokens, their number and the form of each file of a source."""
    if chats := survey.chats.get(source.paths[0]):
        (prefix,) = source.paths
        for path, form in zip(chats.paths, (chats.identity, "mask"), strict=True):
            yield path, prefix, path.removeprefix(prefix), chats.tokens, form
        return
    named = survey.stated(source).paths  # of copies, the URLs
    if not source.is_npy:
        facts = survey.pair(source)
        yield named[0], source.paths[0], BIN_SUFFIX, facts.tokens, facts.identity
        return
    for path, file in zip(named, survey.files(source), strict=True):
        prefix = npy_prefix(file.path)
        yield path, prefix, file.path.removeprefix(prefix), file.tokens, file.dtype.str


def _identify(
    remote: dict[str, tuple[int, str]], path: str, prefix: str, suffix: str, tokens: int, form: str
) -> FileIdentity:
    """Identify a file; `remote` has size and fingerprint of those on other stores, by URL."""
    if (there := remote.get(prefix + suffix)) is not None:
        size, content = there
    else:
        file = Path(prefix + suffix)
        size, content = file.stat().st_size, fingerprint(file)
    stated = manifest_of(prefix, suffix, size)
    return FileIdentity(
        path=redacted(path),
        tokens=tokens,
        form=form,
        content=content,
        sha256=stated[1].files[suffix].sha256 or None if stated else None,
        tokenizer=stated[0].tokenizer.sha256 or None if stated else None,
    )


def _remote_fingerprints(survey: DataSurvey) -> dict[str, tuple[int, str]]:
    """Return size and fingerprint of each file on another store, by URL; remembered in the index cache."""
    files = survey.remote_files
    found = remembered(files, "fingerprint", _read_fingerprints, survey.cache)
    return {file.url: (file.size, content) for file, content in zip(files, found, strict=True)}


def _read_fingerprints(files: Sequence[RemoteFile]) -> list[str]:
    """Return the `fingerprint` of each file, from the blocks of some files at a time."""
    found = []
    for first in range(0, len(files), FILES_AT_ONCE):
        some = files[first : first + FILES_AT_ONCE]
        ranges = [[Range(file, *block) for block in _blocks(file.size)] for file in some]
        contents = iter(read_ranges(list(itertools.chain(*ranges))))
        for file, own in zip(some, ranges, strict=True):
            digest = hashlib.blake2b(file.size.to_bytes(8, "little"), digest_size=16)
            for _ in own:
                digest.update(next(contents))
            found.append(digest.hexdigest())
    return found


def fingerprint(path: Path) -> str:
    """Return the hexadecimal hash of a file's size and of blocks spread evenly over it; of a small file it is of every
    byte.

    Raises:
        CorruptError: it cannot be read, or becomes shorter meanwhile.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
            for offset, length in _blocks(size):
                block = os.pread(stream.fileno(), length, offset)
                if len(block) < length:
                    raise CorruptError(f"{path} has become shorter while it was read; copy it again")
                digest.update(block)
    except OSError as error:
        raise CorruptError(f"{path} cannot be read ({error.strerror}); copy it again") from error
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each block of a file."""
    if size <= BLOCKS * BLOCK_BYTES:
        yield 0, size
        return
    for number in range(BLOCKS):
        yield (size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES


def another_tokenizer(stated: Iterable[str | None], digest: str, whose: str) -> str | None:
    """Return what tokens were made with, in words, where it is not the tokenizer of SHA-256 `digest`.

    A reason for a warning, and no error: an export's tokenizer may be the same one, written anew.

    Args:
        stated: by the manifests of the tokens; empty or None: not known.
        whose: the tokenizer that it is compared with.
    """
    others = {each for each in stated if each} - {digest}
    return f"another tokenizer (SHA-256 {_short(min(others))}…) than {whose} ({_short(digest)}…)" if others else None


# -- what changed


def resumed_identity(
    before: DataIdentity, present: DataIdentity, *, step: int, allowed: Collection[str] | None, run: str
) -> DataIdentity:
    """Return the identity of a run that resumes: the present one, with all changes so far.

    Sets that are added or left out are no change: what a set's name stands for stays the same. Nor are stages that
    the run has not come to.

    Args:
        before: what the checkpoint has.
        step: the checkpoint's.
        allowed: the names of sets that may change; None: all may.
        run: how messages call the run.

    Raises:
        InputError: other sets have changed, one line each.
    """
    changed = list(_differences(before, present, step))
    refused = [
        f"{field} is not what the run in {run} has used so far: {what}; change it back, or name it in"
        f" data.allow_change, as [{name}]"
        for name, field, what in changed
        if allowed is not None and name not in allowed
    ]
    if refused:
        raise InputError("\n".join(refused))
    made = [DataChange(step=step, name=name, what=what) for name, _, what in changed]
    return msgspec.structs.replace(present, changes=[*before.changes, *made])


def _differences(before: DataIdentity, present: DataIdentity, step: int) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each set in both that differs, its field in the configuration, and what differs in words."""
    sets = [(TRAINING, "data.train_data", before.train, present.train)]
    for name in before.valid.keys() & present.valid.keys():
        sets.append((name, f"data.valid_data.{name}", before.valid[name], present.valid[name]))
    for name, field, old, new in sorted(sets, key=lambda each: each[1]):
        if found := list(_set_differences(old, new)):
            yield name, field, "; ".join(found)
    if found := list(_stage_differences(*(_begun(each.train, step) for each in (before, present)))):
        yield TRAINING, "data.stages", "; ".join(found)
    if before.tokenizer and present.tokenizer and before.tokenizer != present.tokenizer:
        yield TOKENIZER, "data.tokenizer", f"SHA-256 {_short(present.tokenizer)} for {_short(before.tokenizer)}"


def _begun(identity: SetIdentity, step: int) -> list[StageIdentity]:
    """Return the stages that samples of the steps up to `step` are from."""
    return [stage for stage in identity.stages if stage.first_step <= step]


def _stage_differences(old: list[StageIdentity], new: list[StageIdentity]) -> Iterator[str]:
    before, now = ([f"{stage.first_step:,}" for stage in stages] for stages in (old, new))
    if before != now:
        yield f"stages from {_steps(now)} for {_steps(before)}"
        return
    for was, stage in zip(old, new, strict=True):
        yield from (f"from step {stage.first_step:,}: {what}" for what in _source_differences(was, stage))


def _steps(numbers: list[str]) -> str:
    return f"step {' and '.join(numbers)}" if numbers else "no step"


def _set_differences(old: SetIdentity, new: SetIdentity) -> Iterator[str]:
    if old.split != new.split:
        yield f"split {new.split} for {old.split}"
    yield from _source_differences(old, new)
    if old.samples != new.samples:
        yield (
            f"the order for {_wanted(new)} in the place of that for {_wanted(old)} (past one epoch it depends on"
            " training.train_iters × training.global_batch_size)"
        )


def _source_differences(old: Mix, new: Mix) -> Iterator[str]:
    if [len(source.files) for source in old.sources] != [len(source.files) for source in new.sources]:
        yield f"{_counted(new)} for {_counted(old)}"
    elif _is_reordered(old.files, new.files):
        yield f"another order of sources, {_named(new.files)} for {_named(old.files)}"
    else:
        yield from _first_of([*filter(None, map(_file_difference, old.files, new.files))])
    if len(old.sources) == len(new.sources):
        weights = zip(new.sources, _weights(old), _weights(new), strict=True)
        yield from _first_of(
            [f"weight {now} for {was} of {of.files[0].path}" for of, was, now in weights if was != now]
        )


def _first_of(found: list[str]) -> list[str]:
    """Name the first of many differences of a kind, and their number."""
    return [found[0] + (f" and {len(found) - 1} more differ" if found[1:] else "")] if found else []


def _is_reordered(old: list[FileIdentity], new: list[FileIdentity]) -> bool:
    before, after = ([(file.form, file.content) for file in files] for files in (old, new))
    return before != after and sorted(before) == sorted(after)


def _file_difference(old: FileIdentity, new: FileIdentity) -> str | None:
    path = new.path if new.path == old.path else f"{new.path}, in the place of {old.path},"
    if (old.tokens, old.form) != (new.tokens, new.form):
        if old.tokens != new.tokens:
            return f"{path} holds {new.tokens:,} tokens for {old.tokens:,}"
        return f"{path} has other sequences or another type ({new.form} for {old.form})"
    if old.content != new.content:
        return f"{path} has other content, fingerprint {_short(new.content)} for {_short(old.content)}"
    for what, then, now in (("SHA-256", old.sha256, new.sha256), ("tokenizer", old.tokenizer, new.tokenizer)):
        if then and now and then != now:
            return f"{path} has another {what} in its manifest, {_short(now)} for {_short(then)}"
    return None


def _weights(identity: Mix) -> list[str]:
    """Return the weights; that of a single source does not count: it is all there is."""
    is_alone = len(identity.sources) == 1
    return ["by size" if source.weight is None or is_alone else str(source.weight) for source in identity.sources]


def _wanted(identity: SetIdentity) -> str:
    return "one epoch" if identity.samples is None else f"{identity.samples:,} samples"


def _counted(identity: Mix) -> str:
    return f"{len(identity.sources)} sources of {len(identity.files)} files"


def _named(files: Sequence[FileIdentity]) -> str:
    return " ".join(file.path for file in files[:4]) + (" …" if len(files) > 4 else "")


def _short(digest: str) -> str:
    return digest[:SHOWN_DIGITS]
