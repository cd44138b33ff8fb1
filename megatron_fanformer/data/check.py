"""Check of a run's token files, once by one process before it starts.

A run of many ranks would otherwise read every index on every rank: gigabytes each for a billion documents. The facts
are small, and are sent to all of them; beyond these they only map the files. torch is not imported.
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
from megatron_fanformer.data.remote_files import RemoteFile, forget, look_up, optional_contents, refuse_changed
from megatron_fanformer.data.token_files import NpyFile, TokenIndex, open_npy_files, read_index, refuse_largest_id
from megatron_fanformer.data.tokenizer import NO_ID, load_tokenizer
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

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

    def pair(self, source: Source) -> TokenIndex:
        """Return the index of a source that is a pair."""
        return self.pairs[source.paths[0]]

    def files(self, source: Source) -> list[NpyFile]:
        """Return the files of a source of .npy files, in their order."""
        return [self.npy_files[path] for path in source.paths]


def check_files(config: DataConfig, vocab_size: int | None = None) -> CheckedData:
    """Check every token file of a run: each index is read once, from end to end.

    The largest ids that manifests state are compared with `vocab_size`, if it is given.

    Raises:
        InputError: a blend that cannot be read, missing files, a .npy file with NumPy's own header, or an id outside
            [0, vocab_size); an id that ends documents is needed and not known.
        CorruptError: token files that disagree with their index or their manifest.
    """
    forget()
    train = config.blend(config.train_data)
    valid = {name: config.blend(items) for name, items in config.valid_data.items()}
    mixes = {name: config.blend(items) for name, items in config.stages.items()}
    data = CheckedData(config.index_cache(), train, valid, mixes)
    optional_contents(prefix + MANIFEST_SUFFIX for prefix in data.prefixes() if is_url(prefix))  # at once
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
    """Open the pairs and the .npy files of `data`, and add them to it."""
    parts = [] if config.split is None else split_bounds(config.split)
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
        if manifest := read_manifest(prefix):
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


def _chat_template(train: Blend) -> str | None:
    """Return the template of the first chats to train on whose manifest states it, with its special tokens."""
    for source in train.sources:
        manifest = read_manifest(source.paths[0])
        if manifest is not None and (settings := manifest.settings.chat) is not None:
            return ChatTemplate(settings.template, settings.template_variables).with_variables()
    return None


def training_conversations(config: DataConfig) -> Conversations:
    """Open the training set of chats; raises as `Conversations`."""
    return Conversations(parse_chats(config.train_data), split=config.split)


def validation_conversations(config: DataConfig) -> dict[str, Conversations]:
    """Return the validation sets of chats by name; raises as `Conversations`."""
    if config.split is not None:
        blend = parse_chats(config.train_data)
        return {SPLIT_VALIDATION: Conversations(blend, split=config.split, part=VALIDATION)}
    return {name: Conversations(parse_chats(items)) for name, items in config.valid_data.items()}
