"""Check of a run's token files, once by one process before it starts; those on other stores may be copied.

A run of many ranks would otherwise read every index on every rank: gigabytes each for a billion documents. The facts
are small, and are sent to all of them; beyond these they only map the files. torch is not imported.

Copies of files on other stores are in a folder of each node that its ranks and later runs share. A copy has its name
once it is whole, and stays until it is removed by hand:

    FOLDER/KEY/name.bin, name.idx, name.manifest.json    a pair, or name.npy; KEY stands for URL and versions
"""

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.blends import VALIDATION, Blend, Source, split_bounds
from megatron_fanformer.data.chat_template import ChatTemplate
from megatron_fanformer.data.chats import Conversations, open_chats, parse_chats
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, read_any_manifest
from megatron_fanformer.data.remote_files import (
    RemoteFile,
    copy_to,
    find,
    folder_of,
    forget,
    look_up,
    only_one_at_a_time,
    optional_contents,
    refuse_changed,
)
from megatron_fanformer.data.token_files import NpyFile, TokenIndex, open_npy_files, read_index, refuse_largest_id
from megatron_fanformer.data.tokenizer import NO_ID, load_tokenizer
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

COPYING_THREADS = 4  # files at a time, each in parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedData:
    """The token files of a run, as they were when they were read."""

    cache: Path
    """The folder for sample indices."""
    train: Blend
    valid: dict[str, Blend]
    mixes: dict[str, Blend]
    """The later mixes of training by their names, as `data.stages` has them."""
    pairs: dict[str, TokenIndex] = field(default_factory=dict)
    """The index of each .bin and .idx pair, by prefix."""
    npy_files: dict[str, NpyFile] = field(default_factory=dict)
    """Each .npy file by its path."""
    chat_template: str | None = None
    """The template that rendered the conversations, in Jinja, with its special tokens, if their manifests state it."""
    copies: "Copies | None" = None
    """The copies that every node of the run needs, where token files on other stores are copied."""
    eod_id: int | None = None
    """The id that ends a document, if the run needs to find document ends."""
    stats: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Size and time of change of each file on this machine."""

    def sources(self) -> list[Source]:
        """Return every source once, those of training first."""
        blends = (self.train, *self.mixes.values(), *self.valid.values())
        return list(dict.fromkeys(source for blend in blends for source in blend.sources))

    def prefixes(self) -> list[str]:
        """Return the prefix of every pair, .npy file and file of chats."""
        return [prefix for source in self.sources() for prefix in source.prefixes]

    @property
    def remote_files(self) -> list[RemoteFile]:
        """Return the files on other stores that samples are read from."""
        remotes = [*(pair.remote for pair in self.pairs.values()), *(file.remote for file in self.npy_files.values())]
        return [remote for remote in remotes if remote is not None]

    def refuse_changed_files(self) -> None:
        """Raise CorruptError for a file that has changed since it was checked."""
        for path, stat in self.stats.items():
            if _stat_of(path) != stat:
                raise CorruptError(f"{path} has changed since the run began; put it back and resume")
        refuse_changed(self.remote_files)

    def stated(self, source: Source) -> Source:
        """Return a source as the configuration names it, of which this may be a copy."""
        if self.copies is None:
            return source
        return _with_paths(source, {copy: url for url, copy in self.copies.paths.items()})

    def pair(self, source: Source) -> TokenIndex:
        """Return the index of a source that is a pair."""
        return self.pairs[source.paths[0]]

    def files(self, source: Source) -> list[NpyFile]:
        """Return the files of a source of .npy files, in their order."""
        return [self.npy_files[path] for path in source.paths]


def check_files(config: DataConfig, vocab_size: int | None = None, *, for_run: bool = False) -> CheckedData:
    """Check every token file of a run: each index is read once, from end to end.

    Args:
        vocab_size: check the largest ids that manifests state against it; None: do not.
        for_run: copy files on other stores to this machine if `config` says so.

    Raises:
        InputError: a blend that cannot be read, missing files, a .npy file with NumPy's own header, or an id outside
            [0, vocab_size); an id that ends documents is needed and not known.
        CorruptError: token files that disagree with their index or their manifest.
    """
    started = time.monotonic()
    forget()
    train = config.blend(config.train_data)
    valid = {name: config.blend(items) for name, items in config.valid_data.items()}
    mixes = {name: config.blend(items) for name, items in config.stages.items()}
    data = CheckedData(config.index_cache(), train, valid, mixes)
    optional_contents(prefix + MANIFEST_SUFFIX for prefix in data.prefixes() if is_url(prefix))  # at once
    if config.is_chats:
        data = dataclasses.replace(data, chat_template=_chat_template(train, valid.values()))
        for source in data.sources():
            chats = open_chats(source.paths[0])
            data.stats.update({str(path): _stat_of(path) for path in (chats.ids_path, chats.mask_path)})
            if vocab_size is not None:
                chats.refuse_stated_ids(vocab_size)
    else:
        if config.marks_documents:
            data = dataclasses.replace(data, eod_id=_end_of_text_id(config, data))
        if urls := [url for source in data.sources() for url in source.urls]:
            logger.info("looking up %d token files on other stores", len(urls))
            look_up(urls)
            if for_run and config.staging_path is not None:
                data = _copied(data, Path(config.staging_path))
        _check_token_files(data, config, vocab_size)
    logger.debug(
        "checked %d pairs, %d .npy files and %d sources in %.1f s",
        *(len(data.pairs), len(data.npy_files), len(data.sources()), time.monotonic() - started),
    )
    return data


def _check_token_files(data: CheckedData, config: DataConfig, vocab_size: int | None) -> None:
    """Open the pairs and the .npy files of `data`, and add them to it."""
    parts = [] if config.applied_split is None else split_bounds(config.applied_split)
    bounds = {number: part for number, part in enumerate(parts) if part is not None}
    for source in data.sources():
        data.stats.update({str(path): _stat_of(path) for path in source.files})
        if source.is_npy:
            data.npy_files.update({file.path: file for file in open_npy_files(source.paths, config.npy_dtype)})
        else:
            data.pairs[source.paths[0]] = read_index(source.paths[0], bounds, cache=data.cache)
    if vocab_size is not None:
        for pair in data.pairs.values():
            pair.refuse_stated_ids(vocab_size)
        for file in data.npy_files.values():
            refuse_largest_id(file.max_token_id, vocab_size, file.path)


def _end_of_text_id(config: DataConfig, data: CheckedData) -> int:
    """Return the id that ends the documents of all token files of a run: by their manifests, else by the tokenizer."""
    ends: dict[int, str] = {}
    for prefix in data.prefixes():
        if manifest := read_any_manifest(prefix):
            ends.setdefault(manifest.tokenizer.eod_id, redacted(prefix) + MANIFEST_SUFFIX)
        elif config.tokenizer and (end := load_tokenizer(config.tokenizer, needs_eod=False).eod_id) != NO_ID:
            ends.setdefault(end, config.tokenizer)
        else:
            raise InputError(
                f"{prefix} has no manifest that says which id ends a document, as data.reset_attention_mask and "
                "data.eod_mask_loss need; set data.tokenizer to the one that made it, if that has an end of text"
            )
        if len(ends) > 1:
            named = " and ".join(f"{eod_id} ({source})" for eod_id, source in ends.items())
            raise InputError(f"documents end with ids {named}, which must be one; prepare them with one tokenizer")
    (eod_id,) = ends
    return eod_id


def _stat_of(path: str | Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


# -- chats


def _chat_template(train: Blend, valid: Iterable[Blend]) -> str | None:
    """Return the one template of all chats to train on that have a manifest; those of validation have it, too."""
    templates: dict[str, str] = {}  # with their special tokens, and the first prefix of each
    trained = {source.paths[0] for source in train.sources}
    of_training: list[str] = []
    for (prefix,) in (source.paths for blend in (train, *valid) for source in blend.sources):
        manifest = read_any_manifest(prefix)
        if manifest is not None and (settings := manifest.settings.chat) is not None:
            template = ChatTemplate(settings.template, settings.template_variables).with_variables()
            templates.setdefault(template, prefix)
            of_training += [template] * (prefix in trained)
    if len(templates) > 1:
        first, second, *_ = templates.values()
        raise InputError(f"{first} and {second} were prepared with different chat templates; prepare both with one")
    return next(iter(of_training), None)


def training_conversations(config: DataConfig) -> Conversations:
    """Open the training set of chats; raises as `Conversations`."""
    return Conversations(parse_chats(config.train_data), split=config.applied_split)


def validation_conversations(config: DataConfig) -> dict[str, Conversations]:
    """Return the validation sets of chats by name; raises as `Conversations`."""
    if config.applied_split is not None:
        blend = parse_chats(config.train_data)
        return {SPLIT_VALIDATION: Conversations(blend, split=config.applied_split, part=VALIDATION)}
    return {name: Conversations(parse_chats(items)) for name, items in config.valid_data.items()}


# -- copies


@dataclass(frozen=True)
class Copies:
    """The copies of token files on other stores that a run needs on each of its nodes."""

    folder: Path
    paths: dict[str, str] = field(default_factory=dict)
    """Path of the copy of each pair (without a suffix) and .npy file, by its URL."""
    files: dict[Path, RemoteFile] = field(default_factory=dict)
    """Token files by the paths of their copies."""
    manifests: dict[str, Path] = field(default_factory=dict)
    """Paths of the copies of manifests, by URL."""

    def fill(self) -> None:
        """Copy the missing files to this node. Raises InputError where there is no room for them."""
        with only_one_at_a_time(self.folder):
            missing = {
                path: file
                for path, file in self.files.items()
                if not (path.is_file() and path.stat().st_size == file.size)
            }
            needed, free = sum(file.size for file in missing.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise InputError(
                    f"data.staging_path {self.folder} has room for {free} bytes, and the run's token files need "
                    f"{needed}; remove earlier copies there, or set data.staging_path to null"
                )
            if missing:
                logger.info("copying %d token files of %.1f GB to %s", len(missing), needed / 1e9, self.folder)
            contents = optional_contents(self.manifests)  # they come before the files that they are of
            for path, content in zip(self.manifests.values(), contents, strict=True):
                if content is not None:
                    with reported_as_local(path):
                        path.parent.mkdir(exist_ok=True)
                        write_atomically(path, content)
            with ThreadPoolExecutor(COPYING_THREADS) as threads:
                for path, _ in zip(missing, threads.map(copy_to, missing.values(), missing), strict=True):
                    logger.debug("copied %s", path)


def _copied(data: CheckedData, folder: Path) -> CheckedData:
    """Copy the token files on other stores, and return `data` with the copies as its sources."""
    copies = _copies_of(data.sources(), folder)
    copies.fill()

    def local(blend: Blend) -> Blend:
        return Blend([_with_paths(source, copies.paths) for source in blend.sources], blend.weights)

    return dataclasses.replace(
        data,
        train=local(data.train),
        valid={name: local(blend) for name, blend in data.valid.items()},
        mixes={name: local(blend) for name, blend in data.mixes.items()},
        copies=copies,
    )


def _with_paths(source: Source, paths: dict[str, str]) -> Source:
    return Source(tuple(paths.get(path, path) for path in source.paths))


def _copies_of(sources: Sequence[Source], folder: Path) -> Copies:
    """Return the copies that sources need, whose files on other stores were looked up."""
    copies = Copies(folder)
    for source in sources:
        for url, prefix in zip(source.paths, source.prefixes, strict=True):
            if not is_url(url):
                continue
            remote: dict[str, RemoteFile] = {}
            for suffix in ("",) if source.is_npy else (".bin", ".idx"):
                if (file := find(url + suffix)) is None:
                    raise InputError(f"{redacted(url)}{suffix} does not exist; name token files that do")
                remote[suffix] = file
            place = folder_of(folder, " ".join(file.identity for file in remote.values()))
            copies.paths[url] = str(place / url.rpartition("/")[2])
            copies.manifests[prefix + MANIFEST_SUFFIX] = place / (prefix.rpartition("/")[2] + MANIFEST_SUFFIX)
            copies.files.update({Path(copies.paths[url] + suffix): file for suffix, file in remote.items()})
    return copies
