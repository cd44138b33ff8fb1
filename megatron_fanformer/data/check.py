"""Check a run's token files before the run starts, in one process and without torch.

An index of a billion documents takes gigabytes. So one process reads every index, and sends its findings, which are
small, to the other ranks; these only map the files.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.blends import VALIDATION, Blend, Source, split_bounds
from megatron_fanformer.data.chat_template import ChatTemplate
from megatron_fanformer.data.chats import Conversations, open_chats, parse_chats
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, read_manifest
from megatron_fanformer.data.remote_files import RemoteFile, forget_files, look_up, read_small_files, refuse_changed
from megatron_fanformer.data.token_files import NpyFile, TokenIndex, open_npy_files, read_index, refuse_largest_id
from megatron_fanformer.data.tokenizer import NO_ID, load_tokenizer
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedData:
    """The token files of a run, as they were at the check."""

    cache: Path
    """The folder for sample indices."""
    train: Blend
    valid: dict[str, Blend]
    mixes: dict[str, Blend]
    """The later mixes of training, by their names in `data.stages`."""
    pairs: dict[str, TokenIndex] = field(default_factory=dict)
    """The index of each .bin and .idx pair, by prefix."""
    npy_files: dict[str, NpyFile] = field(default_factory=dict)
    """Each .npy file, by path."""
    chat_template: str | None = None
    """The Jinja template that rendered the conversations, with its special tokens, if a manifest states it."""
    eod_id: int | None = None
    """The id that ends a document, if the run needs to find document ends."""
    stats: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Size and modification time of each file on this machine; None: the file is missing."""

    def sources(self) -> list[Source]:
        """Return every source once: first those of training, then those of validation."""
        blends = (self.train, *self.mixes.values(), *self.valid.values())
        return list(dict.fromkeys(source for blend in blends for source in blend.sources))

    def prefixes(self) -> list[str]:
        """Return the prefix of every pair, every .npy file and every set of chats."""
        return [prefix for source in self.sources() for prefix in source.prefixes]

    @property
    def remote_files(self) -> list[RemoteFile]:
        """Return the .bin and .npy files that are on other stores."""
        remotes = [*(pair.remote for pair in self.pairs.values()), *(file.remote for file in self.npy_files.values())]
        return [remote for remote in remotes if remote is not None]

    def refuse_changed_files(self) -> None:
        """Raise CorruptError if a file has changed since it was checked."""
        for path, stat in self.stats.items():
            if _stat_of(path) != stat:
                raise CorruptError(f"{path} has changed since the run began; put it back and resume")
        refuse_changed(self.remote_files)

    def pair(self, source: Source) -> TokenIndex:
        """Return the index of a source that is a pair."""
        return self.pairs[source.paths[0]]

    def files(self, source: Source) -> list[NpyFile]:
        """Return the files of a source that consists of .npy files, in their order."""
        return [self.npy_files[path] for path in source.paths]


def check_files(config: DataConfig, vocab_size: int | None = None) -> CheckedData:
    """Check every token file of a run; read each index once, from end to end.

    Args:
        vocab_size: the bound for the token ids that manifests state; None: these are not checked.

    Raises:
        InputError: a blend cannot be read, a file is missing, a .npy file has NumPy's own header, a manifest states an
            id that is not below `vocab_size`, or the id that ends documents is needed and unknown.
        CorruptError: a token file disagrees with its index or its manifest.
    """
    forget_files()
    train = config.blend(config.train_data)
    valid = {name: config.blend(items) for name, items in config.valid_data.items()}
    mixes = {name: config.blend(items) for name, items in config.stages.items()}
    data = CheckedData(config.index_cache(), train, valid, mixes)
    # This requests manifests on other stores in parallel, and remembers the answers for `read_manifest`.
    read_small_files(prefix + MANIFEST_SUFFIX for prefix in data.prefixes() if is_url(prefix))
    if config.is_chats:
        data = dataclasses.replace(data, chat_template=_chat_template(train))
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
        _check_token_files(data, config, vocab_size)
    return data


def _check_token_files(data: CheckedData, config: DataConfig, vocab_size: int | None) -> None:
    """Open the pairs and .npy files of the sources of `data`, and put them into the fields of `data`."""
    all_bounds = [] if config.split is None else split_bounds(config.split)
    parts = {part: bounds for part, bounds in enumerate(all_bounds) if bounds is not None}
    for source in data.sources():
        data.stats.update({str(path): _stat_of(path) for path in source.files})
        if source.is_npy:
            data.npy_files.update({file.path: file for file in open_npy_files(source.paths, config.npy_dtype)})
        else:
            data.pairs[source.paths[0]] = read_index(source.paths[0], parts, cache=data.cache)
    if vocab_size is not None:
        for pair in data.pairs.values():
            pair.refuse_stated_ids(vocab_size)
        for file in data.npy_files.values():
            refuse_largest_id(file.max_token_id, vocab_size, file.path)


def _end_of_text_id(config: DataConfig, data: CheckedData) -> int:
    """Return the id that ends documents, which each manifest or else `data.tokenizer` states. Raises InputError."""
    files_by_end: dict[int, str] = {}
    for prefix in data.prefixes():
        manifest = read_manifest(prefix)
        if manifest is not None:
            files_by_end.setdefault(manifest.tokenizer.eod_id, redacted(prefix) + MANIFEST_SUFFIX)
        elif config.tokenizer and (eod_id := load_tokenizer(config.tokenizer, needs_eod=False).eod_id) != NO_ID:
            files_by_end.setdefault(eod_id, config.tokenizer)
        else:
            raise InputError(
                f"{prefix} has no manifest that says which id ends a document, as data.reset_attention_mask and "
                "data.eod_mask_loss need; set data.tokenizer to the one that made it, if that has an end of text"
            )
        if len(files_by_end) > 1:
            named = " and ".join(f"{eod_id} ({file})" for eod_id, file in files_by_end.items())
            raise InputError(f"documents end with ids {named}, which must be one; prepare them with one tokenizer")
    return next(iter(files_by_end))


def _stat_of(path: str | Path) -> tuple[int, int] | None:
    """Return the size and the modification time of a file, in bytes and nanoseconds; None if it is missing."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


# -- chats


def _chat_template(train: Blend) -> str | None:
    """Return the template, with its special tokens, of the first training chats whose manifest has one; else None."""
    for source in train.sources:
        manifest = read_manifest(source.paths[0])
        if manifest is not None and (settings := manifest.settings.chat) is not None:
            return ChatTemplate(settings.template, settings.template_variables).standalone_source()
    return None


def training_conversations(config: DataConfig) -> Conversations:
    """Open the training set of chats. Raises the errors of `Conversations`."""
    return Conversations(parse_chats(config.train_data), split=config.split)


def validation_conversations(config: DataConfig) -> dict[str, Conversations]:
    """Open the validation sets of chats, by name. Raises the errors of `Conversations`."""
    if config.split is not None:
        return {SPLIT_VALIDATION: Conversations(parse_chats(config.train_data), split=config.split, part=VALIDATION)}
    return {name: Conversations(parse_chats(items)) for name, items in config.valid_data.items()}
