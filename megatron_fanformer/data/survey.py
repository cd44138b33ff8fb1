"""Survey of a run's token files: the facts that it needs, read once by one process before it starts.

A run of many ranks would otherwise read every index on every rank: gigabytes each for a billion documents. The facts
are small, and are sent to all of them; beyond these they only map the files. torch is not imported.
"""

import dataclasses
import logging
import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.blends import Blend, Source, split_bounds
from megatron_fanformer.data.chat_files import open_chats
from megatron_fanformer.data.chat_template import ChatTemplate
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, read_any_manifest
from megatron_fanformer.data.npy_files import NpyFile, open_npy_files
from megatron_fanformer.data.remote_files import RemoteFile, forget, look_up, look_up_contents, refuse_changed
from megatron_fanformer.data.staging import Staging, staging_of
from megatron_fanformer.data.token_files import TokenIndex, check_index_ids, read_index, refuse_largest_id
from megatron_fanformer.data.tokenizer import NO_ID, load_tokenizer
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatFacts:
    """The facts of the files of chats."""

    tokens: int
    identity: str
    """A fingerprint that changes when the length of a conversation does."""
    paths: tuple[str, str]
    """The files of the ids and of the mask."""


@dataclass(frozen=True)
class DataSurvey:
    """The token files of a run, as they were when they were read."""

    cache: Path
    """The folder for sample indices."""
    train: Blend
    valid: dict[str, Blend]
    pairs: dict[str, TokenIndex]
    """Index facts of each .bin and .idx pair, by prefix."""
    npy_files: dict[str, NpyFile]
    """Each .npy file by its path."""
    chats: dict[str, ChatFacts] = field(default_factory=dict)
    """Chat files by prefix, for fine-tuning, which reads no other files."""
    chat_template: str | None = None
    """The template that rendered the conversations, in Jinja, with its special tokens, if their manifests state it."""
    staging: Staging | None = None
    """The copies that every node of the run needs, where token files on other stores are copied."""
    eod_id: int | None = None
    """The id that ends a document, if the run needs to find document ends."""
    stages: dict[str, Blend] = field(default_factory=dict)
    """The mixes of later stages by their names, as the configuration has them."""
    stats: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Size and time of change of each file on this machine."""

    def sources(self) -> list[Source]:
        """Return every source once, those of training first."""
        blends = (self.train, *self.stages.values(), *self.valid.values())
        return list(dict.fromkeys(source for blend in blends for source in blend.sources))

    @property
    def remote_files(self) -> list[RemoteFile]:
        """Return the files on other stores that samples are read from."""
        remotes = [*(pair.remote for pair in self.pairs.values()), *(file.remote for file in self.npy_files.values())]
        return [remote for remote in remotes if remote is not None]

    def refuse_changed_files(self) -> None:
        """Raise CorruptError for a file that has changed since the survey."""
        for path, stat in self.stats.items():
            if _stat_of(path) != stat:
                raise CorruptError(f"{path} has changed since the run began; put it back and resume")
        refuse_changed(self.remote_files)

    def stated(self, source: Source) -> Source:
        """Return a source as the configuration names it, of which this may be a copy."""
        return source if self.staging is None else self.staging.stated(source)

    def pair(self, source: Source) -> TokenIndex:
        """Return the index of a source that is a pair."""
        return self.pairs[source.paths[0]]

    def files(self, source: Source) -> list[NpyFile]:
        """Return the files of a source of .npy files, in their order."""
        return [self.npy_files[path] for path in source.paths]


def survey_data(config: DataConfig, vocab_size: int | None = None, *, for_run: bool = False) -> DataSurvey:
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
    cache = config.index_cache()
    look_up_contents(prefix + MANIFEST_SUFFIX for prefix in config.prefixes() if is_url(prefix))  # at once
    eod_id = _end_of_text_id(config) if config.marks_documents else None
    chat_template = _chat_template(train, valid.values()) if config.is_chats else None
    stages = {name: config.blend(items) for name, items in config.stages.items()}
    survey = DataSurvey(cache, train, valid, {}, {}, eod_id=eod_id, chat_template=chat_template, stages=stages)
    if urls := [url for source in survey.sources() for url in source.urls]:
        logger.info("looking up %d token files on other stores", len(urls))
        look_up(urls)
        if for_run and config.staging_path is not None:
            staging = staging_of(survey.sources(), Path(config.staging_path))
            staging.fill()
            survey = dataclasses.replace(
                survey,
                train=staging.local(train),
                valid={name: staging.local(blend) for name, blend in valid.items()},
                stages={name: staging.local(blend) for name, blend in stages.items()},
                staging=staging,
            )
    parts = [] if config.applied_split is None else split_bounds(config.applied_split)
    bounds = {number: part for number, part in enumerate(parts) if part is not None}
    for source in survey.sources():
        if config.is_chats:
            facts = survey.chats[source.paths[0]] = _chat_facts(source.paths[0], vocab_size)
            survey.stats.update({path: _stat_of(path) for path in facts.paths})
            continue
        survey.stats.update({str(path): _stat_of(path) for path in source.files})
        if source.is_npy:
            files = open_npy_files(source.paths, config.npy_dtype)
            survey.npy_files.update({file.path: file for file in files})
            continue
        (prefix,) = source.paths
        survey.pairs[prefix] = read_index(prefix, bounds, cache=cache)
    if vocab_size is not None:
        for pair in survey.pairs.values():
            check_index_ids(pair, vocab_size)
        for file in survey.npy_files.values():
            refuse_largest_id(file.max_token_id, vocab_size, file.path)
    logger.debug(
        "checked %d pairs, %d .npy files and %d files of chats in %.1f s",
        len(survey.pairs),
        len(survey.npy_files),
        len(survey.chats),
        time.monotonic() - started,
    )
    return survey


def _end_of_text_id(config: DataConfig) -> int:
    """Return the id that ends the documents of all token files of a run: by their manifests, else by the tokenizer."""
    ends: dict[int, str] = {}
    for prefix in config.prefixes():
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


def _chat_template(train: Blend, valid: Iterable[Blend]) -> str | None:
    """Return the one template of all chats to train on that have a manifest; those of validation have it, too."""
    if len(templates := _chat_templates([train, *valid])) > 1:
        first, second, *_ = templates.values()
        raise InputError(f"{first} and {second} were prepared with different chat templates; prepare both with one")
    return next(iter(_chat_templates([train])), None)


def _chat_templates(blends: Iterable[Blend]) -> dict[str, str]:
    """Return the templates that manifests of chats state, with their special tokens, and the first prefix of each."""
    templates: dict[str, str] = {}
    for (prefix,) in (source.paths for blend in blends for source in blend.sources):
        manifest = read_any_manifest(prefix)
        if manifest is not None and (settings := manifest.settings.chat) is not None:
            template = ChatTemplate(settings.template, settings.template_variables)
            templates.setdefault(template.with_variables(), prefix)
    return templates


def _stat_of(path: str | Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _chat_facts(prefix: str, vocab_size: int | None) -> ChatFacts:
    chats = open_chats(prefix)
    if vocab_size is not None:
        chats.check_ids(vocab_size)
    tokens = int(chats.lengths.sum())
    identity = f"{chats.dtype} {len(chats)} {tokens} {zlib.crc32(chats.lengths.tobytes()):08x}"
    return ChatFacts(tokens, identity, (str(chats.ids_path), str(chats.mask_path)))
