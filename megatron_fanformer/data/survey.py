"""Survey of a run's token files: the facts that it needs, read once by one process before it starts.

A run of many ranks would otherwise read every index on every rank: gigabytes each for a billion documents. What is
found here is small, and is sent to all of them; beyond it they only map the files. torch is not imported.
"""

import dataclasses
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import Blend, Source, split_bounds
from megatron_fanformer.data.chat_files import open_chats
from megatron_fanformer.data.chat_template import ChatTemplate
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.file_tasks import FileTasks
from megatron_fanformer.data.id_bounds import is_read, is_remembered, scan_of
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, read_any_manifest
from megatron_fanformer.data.npy_files import NpyFile, check_npy_ids, open_npy_files
from megatron_fanformer.data.remote_files import RemoteFile, forget, look_up, look_up_contents
from megatron_fanformer.data.staging import Staging, staging_of
from megatron_fanformer.data.token_files import TokenIndex, bin_path, check_index_ids, read_index, reads_ids
from megatron_fanformer.data.tokenizer import NO_ID, load_tokenizer
from megatron_fanformer.errors import CorruptError, FanformerError, InputError, redacted
from megatron_fanformer.stores import is_url

logger = logging.getLogger(__name__)

DEFERRED_BYTES = 1 << 33  # some seconds of reading


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
    has_unread_ids: bool = False
    """Whether files without a manifest are still to be read for their largest id (`DeferredScan`)."""

    def sources(self) -> list[Source]:
        """Return every source once, those of training first."""
        blends = (self.train, *self.stages.values(), *self.valid.values())
        return list(dict.fromkeys(source for blend in blends for source in blend.sources))

    @property
    def remote_files(self) -> list[RemoteFile]:
        """Return the files on other stores that samples are read from."""
        found = [pair.remote for pair in self.pairs.values()] + [file.remote for file in self.npy_files.values()]
        return [file for file in found if file is not None]

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
        vocab_size: check all ids against it; a file without a manifest may be read completely for that. None: do not.
        for_run: leave the reading to a `DeferredScan` where it takes long, and copy files on other stores to this
            machine if `config` says so.

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
    if urls := [prefix for prefix in config.prefixes() if is_url(prefix)]:
        look_up_contents(prefix + MANIFEST_SUFFIX for prefix in urls)  # at once, and not one by one below
    eod_id = _end_of_text_id(config) if config.marks_documents else None
    chat_template = _chat_template(train, valid.values()) if config.is_chats else None
    stages = {name: config.blend(items) for name, items in config.stages.items()}
    survey = DataSurvey(cache, train, valid, {}, {}, eod_id=eod_id, chat_template=chat_template, stages=stages)
    if any(source.urls for source in survey.sources()):
        _look_up_all(survey.sources())
        staging = _staging(config, survey.sources()) if for_run else None
        if staging is not None:
            staging.fill(is_first=True)
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
            survey.chats[source.paths[0]] = _chat_facts(source.paths[0], vocab_size, cache)
            continue
        if source.is_npy:
            files = open_npy_files(source.paths, config.npy_dtype, cache=cache)
            survey.npy_files.update({file.path: file for file in files})
            continue
        (prefix,) = source.paths
        survey.pairs[prefix] = read_index(prefix, bounds, cache=cache)
    if vocab_size is not None:
        survey = _with_checked_ids(survey, vocab_size, may_defer=for_run)
    _log_survey(survey, time.monotonic() - started)
    return survey


def _with_checked_ids(survey: DataSurvey, vocab_size: int, *, may_defer: bool) -> DataSurvey:
    """Check all ids; those that take long to read are left for later, if they may be, as the result then says."""
    checks = _id_checks(survey, vocab_size)
    for check in checks:
        if not check.bytes_to_read:
            check.run()
    unread = [check for check in checks if check.bytes_to_read]
    if may_defer and _bytes_of(unread) >= DEFERRED_BYTES:
        return dataclasses.replace(survey, has_unread_ids=True)
    scan_of(_bytes_of(unread)).run([check.run for check in unread])
    return survey


@dataclass(frozen=True)
class _IdCheck:
    """The check of a file's ids against the vocabulary."""

    run: Callable[..., None]
    bytes_to_read: int
    """Of a file that is read for its largest id; 0 where a manifest states it, or it was read before."""


def _id_checks(survey: DataSurvey, vocab_size: int) -> list[_IdCheck]:
    """Return the checks of all files."""
    cache, checks = survey.cache, []
    for pair in survey.pairs.values():
        size = _unread_bytes(bin_path(pair.prefix), pair.dtype, cache) if reads_ids(pair, vocab_size) else 0
        checks.append(_IdCheck(partial(check_index_ids, pair, vocab_size, cache=cache), size))
    for file in survey.npy_files.values():
        is_unknown = file.max_token_id is None and file.remote is None and is_read(file.dtype, vocab_size)
        size = _unread_bytes(Path(file.path), file.dtype, cache) if is_unknown else 0
        checks.append(_IdCheck(partial(check_npy_ids, file, vocab_size, cache=cache), size))
    return checks


def _unread_bytes(file: Path, dtype: np.dtype[Any], cache: Path) -> int:
    return 0 if is_remembered(file, dtype, cache) else file.stat().st_size


def _bytes_of(checks: Sequence[_IdCheck]) -> int:
    return sum(check.bytes_to_read for check in checks)


class DeferredScan:
    """Checks the ids of files without a manifest while a run goes on, whose samples are checked as they are read.

    Args:
        survey: whose `has_unread_ids` says whether there are any.
    """

    def __init__(self, survey: DataSurvey, vocab_size: int) -> None:
        self._survey, self._vocab_size = survey, vocab_size
        self._error: CorruptError | None = None
        self._scan: FileTasks | None = None

    def start(self) -> None:
        """Begin, on the one rank that does it."""
        if self._survey.has_unread_ids:
            logger.info("reading token files without a manifest for their largest id while the run goes on")
            unread = [check for check in _id_checks(self._survey, self._vocab_size) if check.bytes_to_read]
            self._scan = scan_of(_bytes_of(unread))
            threading.Thread(target=self._check, args=[self._scan, unread], daemon=True).start()

    def _check(self, scan: FileTasks, unread: Sequence[_IdCheck]) -> None:
        try:
            scan.run([check.run for check in unread])
            logger.info("all ids of the token files are within the vocabulary")
        except InterruptedError:
            pass  # stopped
        except FanformerError as error:
            self._error = CorruptError(str(error))  # which the run has read by now, or might
        except OSError as error:
            self._error = CorruptError(f"{error.filename} cannot be read ({error.strerror}); put it back and resume")

    def raise_failure(self) -> None:
        """Raise the CorruptError of a file that was refused meanwhile."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End soon; what has been read of whole files is remembered."""
        if self._scan is not None:
            self._scan.stop()


def _look_up_all(sources: Sequence[Source]) -> None:
    """Look up at once what will be read of files on other stores."""
    urls = [url for source in sources for url in source.urls]
    logger.info("looking up %d token files on other stores", len(urls))
    look_up(urls)
    look_up_contents(prefix + MANIFEST_SUFFIX for source in sources for prefix in source.prefixes if is_url(prefix))


def _staging(config: DataConfig, sources: Sequence[Source]) -> Staging | None:
    """Return the copies of files on other stores that a run makes; None: it reads them there. The reason is logged."""
    reason = "data.remote is ranged" if config.remote == "ranged" else "data.staging_path is null"
    if config.staging_path is not None and config.remote != "ranged":
        staging = staging_of(sources, Path(config.staging_path), config.staging_bytes)
        refusal = staging.refusal() if config.remote == "auto" else None
        if refusal is None:
            logger.info("token files on other stores are copied to %s first", staging.folder)
            return staging
        reason = refusal
    logger.info("token files on other stores are read there by ranges, not copied: %s", reason)
    if config.num_workers == 0:
        logger.info("data.num_workers is 0, so that steps wait for requests; 2 processes read ahead")
    return None


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
    if len(found := _chat_templates([train, *valid])) > 1:
        first, second, *_ = found.values()
        raise InputError(f"{first} and {second} were prepared with different chat templates; prepare both with one")
    return next(iter(_chat_templates([train])), None)


def _chat_templates(blends: Iterable[Blend]) -> dict[str, str]:
    """Return the templates that manifests of chats state, with their special tokens, and the first prefix of each."""
    found: dict[str, str] = {}
    for (prefix,) in (source.paths for blend in blends for source in blend.sources):
        manifest = read_any_manifest(prefix)
        if manifest is not None and (settings := manifest.settings.chat) is not None:
            template = ChatTemplate(settings.template, settings.template_variables)
            found.setdefault(template.with_variables(), prefix)
    return found


def _chat_facts(prefix: str, vocab_size: int | None, cache: Path) -> ChatFacts:
    chats = open_chats(prefix)
    if vocab_size is not None:
        chats.check_ids(vocab_size, cache=cache)
    tokens = int(chats.lengths.sum())
    identity = f"{chats.dtype} {len(chats)} {tokens} {zlib.crc32(chats.lengths.tobytes()):08x}"
    return ChatFacts(tokens, identity, (str(chats.ids_path), str(chats.mask_path)))


def _log_survey(survey: DataSurvey, seconds: float) -> None:
    tokens = sum(pair.tokens for pair in survey.pairs.values()) + sum(file.tokens for file in survey.npy_files.values())
    tokens += sum(chats.tokens for chats in survey.chats.values())
    logger.debug(
        "checked %d pairs, %d .npy files and %d files of chats of %s tokens in %.1f s",
        len(survey.pairs),
        len(survey.npy_files),
        len(survey.chats),
        f"{tokens:,}",
        seconds,
    )
