"""Perplexity sets: their files, the pieces that these are cut into, and the bytes and words of their text.

The paper's two groups are OLMo's. There is no package of them: whoever has them has them as OLMo lays them out, in one
of several ways (`PLACES`, `FORMS`). Nothing here imports torch.
"""

import dataclasses
import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fanformer.data.manifest import Manifest, manifest_of
from megatron_fanformer.data.remote_files import find, listed, side_by_side
from megatron_fanformer.data.token_files import (
    BIN_SUFFIX,
    NPY_SUFFIX,
    NpyFile,
    bin_path,
    idx_path,
    npy_prefix,
    open_npy_files,
    read_index,
    refuse_ids_read,
    refuse_largest_id,
)
from megatron_fanformer.data.tokenizer import NO_ID, Tokenizer
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.evaluate.config import Chunking, Group, PerplexityConfig
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import is_url

SETS: dict[Group, tuple[str, ...]] = {
    "v2-small": (
        *("4chan", "c4_100_domains", "c4_en", "gab", "ice", "m2d2_s2orc", "m2d2_wiki", "manosphere", "mc4_en"),
        *("pile", "ptb", "twitterAEC", "wikitext_103"),
    ),
    "v3-small": (
        *("c4_en", "dolma_books", "dolma_common-crawl", "dolma_pes2o", "dolma_reddit", "dolma_stack", "dolma_wiki"),
        *("ice", "m2d2_s2orc", "pile", "wikitext_103"),
    ),
}
"""The sets of the paper's groups, by OLMo's names."""
PLACES = (
    *("{version}", "validation/{version}", "{version}_small_gptneox20b", "perplexity/{version}_small_gptneox20b"),
    *("eval-data/perplexity/{version}_small_gptneox20b", "{version}-small"),
)
"""Subfolders where a group may be; if no other group is requested, the folder itself may be it."""
FORMS = ("val.npy", "val/*.npy", "part-*.npy", "val.idx")
"""Contents of a set's folder; a set may also be one file of its name."""
SECTION = "evaluation.perplexity"
PIECES_AT_ONCE = 64  # requested from another store
WHITE_SPACE = re.compile(r"\s+")  # lm-eval's words are separated by it
TOKENS_AT_ONCE = 1 << 24  # read in search of ends of documents


def set_name(group: Group, name: str) -> str:
    """Return OLMo's name of a set of a group in its metrics."""
    return f"{group}-{name}-validation"


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of a set, and where its documents begin."""

    file: NpyFile
    """The `.npy` file, or a pair's `.bin` file, which also holds nothing but ids."""
    index: str | None
    """The prefix of the pair; None for a `.npy` file."""
    manifest: Manifest | None
    """None where there is none, or it is another file's."""
    eod_id: int | None
    """The id that ends its documents, if that is known; of a pair, whose index has their bounds, only for `rolling`."""

    def document_starts(self) -> np.ndarray:
        """Return [documents + 1] int64: the token at which each document begins, and the number of tokens.

        Raises:
            InputError: it is not known what ends a document.
        """
        if self.index is not None:
            index = read_index(self.index, cache=cache_of(self.index))
            return np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.bounds]
        if self.eod_id is None:
            raise InputError(
                f"{self.file.path} does not say where its documents end; set {SECTION}.eod_id, or chunking to tokens"
            )
        return np.unique(np.concatenate([[0], self._ends_of_text() + 1, [self.file.tokens]]))

    def texts(self) -> np.ndarray:
        """Return [documents, 2] int64: first token and number of tokens of each, without the id that ends it.

        Raises:
            InputError: it is not known what ends a document.
        """
        if self.eod_id is None:
            raise InputError(
                f"{self.file.path} does not say which id ends its documents, which leads each; set {SECTION}.eod_id"
            )
        bounds = self.document_starts()
        ends = bounds[1:] - np.isin(bounds[1:] - 1, self._ends_of_text())
        return np.stack([bounds[:-1], ends - bounds[:-1]], axis=1)[ends > bounds[:-1]]

    def _ends_of_text(self) -> np.ndarray:
        """Return the places of the id that ends documents."""
        parts = [
            first + np.flatnonzero(self.file.read(first, min(TOKENS_AT_ONCE, self.file.tokens - first)) == self.eod_id)
            for first in range(0, self.file.tokens, TOKENS_AT_ONCE)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass(frozen=True, kw_only=True)
class PerplexitySet:
    """The files of a set, and how they are cut."""

    name: str
    files: tuple[TokenFile, ...]
    chunking: Chunking
    chunk_tokens: int
    """The most tokens of a piece; with `rolling` those that the model is given."""
    vocab_size: int
    """The model's vocabulary size: ids are below it."""
    most_tokens: int | None
    """Take pieces (with `rolling`, whole documents) from its beginning until there are so many tokens; None: all."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the original text per token; None if not known."""
    words_per_token: float | None = None
    """Words of the text, between white space, per scored token; None if not known, and but for `rolling`."""

    def pieces(self) -> np.ndarray:
        """Return [n, 4] int64: file, first token and number of tokens of each piece, and how many are scored.

        Raises:
            InputError: there is none, or it is not known where documents end.
        """
        if self.chunking == "rolling":
            pieces = rolling_pieces(self.documents(), self.chunk_tokens)
        else:
            cut = [
                document_pieces(number, file.document_starts(), self.chunk_tokens)
                if self.chunking == "documents"
                else chunks(number, file.file.tokens, self.chunk_tokens)
                for number, file in enumerate(self.files)
            ]
            pieces = self._first(np.concatenate(cut))
        if not len(pieces):
            held = f"{self.name} holds {sum(file.file.tokens for file in self.files)} tokens in {len(self.files)} files"
            if self.chunking == "rolling":
                raise InputError(f"{held} and no text between ends of documents; name files that hold one")
            raise InputError(
                f"{held} and no piece of {self.chunk_tokens}; "
                f"set {SECTION}.chunk_tokens lower, or chunking to documents"
            )
        return pieces

    def documents(self) -> np.ndarray:
        """Return [n, 3] int64: file, first token and number of tokens of each document with a text, for `rolling`.

        Raises:
            InputError: it is not known where documents end.
        """
        return self._first(np.concatenate([np.insert(file.texts(), 0, n, axis=1) for n, file in enumerate(self.files)]))

    def read(self, piece: np.ndarray) -> np.ndarray:
        """Return [tokens] int64 of one row of `pieces`, with the end of text that leads it, or of `documents`.

        Raises:
            CorruptError: a file holds an id outside the vocabulary.
        """
        number, first, count, *scored = map(int, piece)
        file, leads = self.files[number].file, self.files[number].eod_id
        ids = file.read(first, count)
        refuse_ids_read(ids, self.vocab_size, file.path, first)
        ids = ids.astype(np.int64)
        return np.insert(ids, 0, leads) if leads is not None and scored == [count] else ids

    def _first(self, parts: np.ndarray) -> np.ndarray:
        if self.most_tokens is None:
            return parts
        return parts[np.cumsum(parts[:, 2]) - parts[:, 2] < self.most_tokens]


def lengths_of(pieces: np.ndarray) -> np.ndarray:
    """Return [n]: the number of ids that `read` returns for each piece."""
    return np.asarray(pieces[:, 2] + (pieces[:, 3] == pieces[:, 2]))


# -- pieces
#
# A piece is [file, first token, number of tokens, how many of its last ones are scored]. One of which all are scored is
# led by an end of text, of which its first token is predicted.


def chunks(number: int, tokens: int, size: int) -> np.ndarray:
    """Return the paper's chunks: each file from its beginning, the rest dropped, so that all are of one length."""
    starts = np.arange(tokens // size, dtype=np.int64) * size
    return _pieces(number, starts, np.full_like(starts, size), np.full_like(starts, size - 1))


def document_pieces(number: int, bounds: np.ndarray, size: int) -> np.ndarray:
    """Return documents; a longer one in pieces that share one token, so that each of its tokens but the first is scored
    once.

    A document of a single token has none that could be.

    Args:
        bounds: [documents + 1] the token at which each begins, and the number of tokens.
    """
    lengths = np.diff(bounds)
    counts = np.maximum(lengths - 2, -1) // (size - 1) + 1
    starts = np.repeat(bounds[:-1], counts) + _numbers_within(counts) * (size - 1)
    ends = np.minimum(np.repeat(bounds[1:], counts), starts + size)
    return _pieces(number, starts, ends - starts, ends - starts - 1)


def rolling_pieces(documents: np.ndarray, size: int) -> np.ndarray:
    """Return lm-eval's rolling windows: every token of a document is scored once, the first after an end of text.

    The model sees `size` tokens: of a document's last window, which scores what is left, as many of those before it as
    fit (lm-eval's `get_rolling_token_windows` of context_len 1, and `make_disjoint_window`).

    Args:
        documents: [n, 3] file, first token and number of tokens of each, without the id that ends it.
    """
    counts = -(-documents[:, 2] // size)
    number, begin, length = np.repeat(documents, counts, axis=0).T
    before = _numbers_within(counts) * size
    scored = np.minimum(length - before, size)
    given = np.where(before > 0, size + 1, scored)  # the first window is led by an end of text
    return _pieces(number, begin + before + scored - given, given, scored)


def _numbers_within(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, … of each document's pieces, one document after another."""
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def _pieces(number: int | np.ndarray, starts: np.ndarray, lengths: np.ndarray, scored: np.ndarray) -> np.ndarray:
    return np.stack([np.broadcast_to(number, starts.shape), starts, lengths, scored], axis=1).astype(np.int64)


# -- finding them


def set_problems(config: PerplexityConfig) -> list[str]:
    """List the missing files of the named sets and groups, and the searched places; open no file."""
    problems = []
    for name, paths in config.sets.items():
        problems += [
            f"{SECTION}.sets.{name}: {redacted(path)} names no token files; name a .npy file, the prefix of a .bin and "
            ".idx pair, a folder (a URL of one ends in /) or a pattern"
            for path in paths
            if not _files_of(path)
        ]
    if config.folder is None:
        return problems
    if not Path(config.folder).is_dir():
        return [*problems, f"{SECTION}.folder: {config.folder} is not a folder; name the one that holds a group's sets"]
    for group in config.groups:
        if missing := [name for name in SETS[group] if not _group_files(config, group, name)]:
            problems.append(
                f"{SECTION}.folder: {config.folder} lacks {len(missing)} of the {len(SETS[group])} sets of {group} "
                f"({', '.join(missing)}), looked for as SET/{', SET/'.join(FORMS)}, SET.npy and SET.idx in "
                f"{', '.join(_places(config, group))}; copy them there, or name those that you have in {SECTION}.sets"
            )
    return problems


def _places(config: PerplexityConfig, group: Group) -> list[str]:
    """Return a group's subfolders. Both groups have sets of one name: the folder itself can hold one of them alone."""
    places = [place.format(version=group.removesuffix("-small")) for place in PLACES]
    return [*places, "."] if len(config.groups) == 1 else places


def _files_of(path: str) -> list[str]:
    """Return the .npy files and the prefixes of pairs that a file, a prefix, a folder or a glob names."""
    if is_url(path):
        if path.endswith("/") or (path.endswith(NPY_SUFFIX) and glob.has_magic(path)):
            return listed(path, NPY_SUFFIX)
        return [path] if find(path if path.endswith(NPY_SUFFIX) else f"{path}.idx") is not None else []
    if Path(path).is_dir() and not idx_path(path).exists():
        matches = [str(file) for file in Path(path).iterdir()]
    elif glob.has_magic(path) and not Path(path).exists():
        matches = glob.glob(path, recursive=True)
    else:
        matches = [path, f"{path}.idx", f"{path}{NPY_SUFFIX}"]
    files = {match for match in matches if match.endswith(NPY_SUFFIX) and Path(match).is_file()}
    pairs = {match[: -len(".idx")] for match in matches if match.endswith((".idx", ".bin"))}
    return sorted(files | {prefix for prefix in pairs if idx_path(prefix).is_file()})


def _group_files(config: PerplexityConfig, group: Group, name: str) -> list[str]:
    """Return the files of the first place and form that has a group's set."""
    spelling = name.replace("common-crawl", "common[-_]crawl")
    for place in _places(config, group):
        path = f"{glob.escape(str(Path(config.folder or '') / place))}/{spelling}"
        for pattern in (*(f"{path}/{form}" for form in FORMS), f"{path}{NPY_SUFFIX}", f"{path}.idx"):
            if files := sorted(file for match in glob.glob(pattern) for file in _files_of(match)):
                return files
    return []


def find_sets(
    config: PerplexityConfig,
    *,
    seq_length: int,
    vocab_size: int,
    end_of_text_id: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[PerplexitySet]:
    """Return the sets of a configuration without `problems()`, opened and checked: groups first, then the named ones.

    Args:
        seq_length: the model's: the longest piece that it may be given.
        vocab_size: the model's.
        end_of_text_id: the model's, which ends a document where neither `config` nor a manifest says what does.
        tokenizer: gives, where a set has no manifest, how many bytes its tokens are, and, where nothing else says it,
            what ends a document, if it has an id for that.

    Raises:
        InputError: sets are missing (all that are, one line each), empty, or of another vocabulary, or so is the end of
            text that leads documents; pieces are longer than the model's sequences.
        CorruptError: a file is damaged.
    """
    chunk = config.chunk_tokens or seq_length
    problems = set_problems(config)
    if chunk > seq_length:
        problems.append(
            f"{SECTION}.chunk_tokens is {chunk}, longer than the {seq_length} tokens that the model was trained on; "
            "set it to null, or lower"
        )
    if problems:
        raise InputError("\n".join(problems))
    paths = {
        set_name(group, name): _group_files(config, group, name) for group in config.groups for name in SETS[group]
    }
    paths |= {name: [file for path in named for file in _files_of(path)] for name, named in config.sets.items()}
    sets = []
    for name, files in paths.items():
        perplexity_set = PerplexitySet(
            name=name,
            files=tuple(_open(path, config, end_of_text_id, tokenizer) for path in files),
            chunking=config.chunking,
            chunk_tokens=chunk,
            vocab_size=vocab_size,
            most_tokens=config.limit_tokens,
        )
        for file in perplexity_set.files:
            refuse_largest_id(file.file.max_token_id, vocab_size, file.file.path)
            leads = file.eod_id if config.chunking == "rolling" else None  # no file holds the id that leads documents
            if leads is not None and not 0 <= leads < vocab_size:
                raise InputError(
                    f"{file.file.path}: its documents end with id {leads}, which leads each and is outside the "
                    f"vocabulary of {vocab_size}; set {SECTION}.eod_id to the model's end of text"
                )
        sets.append(_with_text(perplexity_set, tokenizer))
    return sets


def _open(path: str, config: PerplexityConfig, end_of_text_id: int | None, tokenizer: Tokenizer | None) -> TokenFile:
    is_npy = path.endswith(NPY_SUFFIX)
    if is_npy:
        (file,) = open_npy_files([path], config.npy_dtype)
    else:
        index = read_index(path, cache=cache_of(path))
        name = f"{path}.bin" if is_url(path) else str(bin_path(path))
        file = NpyFile(name, index.dtype, index.tokens, None, index.remote)
    prefix, suffix = (npy_prefix(path), NPY_SUFFIX) if is_npy else (path, BIN_SUFFIX)
    ends = [config.eod_id, end_of_text_id, None if tokenizer is None else tokenizer.eod_id]
    manifest = None
    if stated := manifest_of(prefix, suffix, file.tokens * file.dtype.itemsize):
        manifest, entry = stated
        file = dataclasses.replace(file, max_token_id=entry.max_token_id)
        ends.insert(1, manifest.tokenizer.eod_id)
    eod_id = next((end for end in ends if end not in (None, NO_ID)), None)
    return TokenFile(file=file, index=None if is_npy else path, manifest=manifest, eod_id=eod_id)


# -- bytes and words


def _with_text(cut: PerplexitySet, tokenizer: Tokenizer | None) -> PerplexitySet:
    """Return the set with the bytes of a token, by the manifests of its files or else decoded, and its words.

    The bytes are those of all files where these have manifests, else of the scored tokens. With `rolling`, they are
    those of the scored text as lm-eval counts them, and so are the words, which are always decoded.
    """
    pieces = cut.pieces()  # raises for a set of which nothing can be scored
    scored, is_rolling = int(pieces[:, 3].sum()), cut.chunking == "rolling"
    # a part's manifest does not state its text; one of tokens without a text states 0 bytes
    manifests = [
        file.manifest for file in cut.files if isinstance(file.manifest, Manifest) and file.manifest.text_bytes
    ]
    are_stated = len(manifests) == len(cut.files) and not (is_rolling and cut.most_tokens is not None)
    text_bytes = words = 0
    if tokenizer is not None and (is_rolling or not are_stated):
        for text in _texts(cut, cut.documents() if is_rolling else pieces[:, :3] + (0, 1, -1), tokenizer):
            text_bytes += len(text.encode(errors="replace"))
            words += len(WHITE_SPACE.split(text)) if is_rolling else 0
    tokens = scored
    if are_stated:
        text_bytes = sum(manifest.text_bytes for manifest in manifests)
        tokens = scored if is_rolling else sum(manifest.tokens for manifest in manifests)
    return dataclasses.replace(cut, bytes_per_token=text_bytes / tokens or None, words_per_token=words / scored or None)


def _texts(cut: PerplexitySet, parts: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of parts [n, 3]; the end of a document has none, nor has an id without a piece."""
    for first in range(0, len(parts), PIECES_AT_ONCE):
        some = parts[first : first + PIECES_AT_ONCE]
        for part, ids in zip(some, side_by_side(cut.read, some), strict=True):
            end = cut.files[part[0]].eod_id
            has_text = (ids < tokenizer.vocab_size) & (ids != (NO_ID if end is None else end))
            yield tokenizer.decode(ids[has_text].tolist())
