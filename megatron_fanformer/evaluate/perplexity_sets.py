"""Perplexity sets: their files, the pieces that these are cut into, and the bytes and words of their text.

The paper's two groups are OLMo's. There is no package of them: whoever has them has them as OLMo lays them out, in one
of its ways (`PLACES`, `FORMS`). Nothing here imports torch.
"""

import dataclasses
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fanformer.data.manifest import Manifest, PartManifest, TokenFiles, manifest_of
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
SPELLINGS = {"dolma_common-crawl": ("dolma_common-crawl", "dolma_common_crawl")}
VERSIONS: dict[Group, str] = {"v2-small": "v2", "v3-small": "v3"}
PLACES: dict[Group, tuple[str, ...]] = {
    group: (
        *(f"{above}{version}" for above in ("", "validation/")),
        *(f"{above}{version}_small_gptneox20b" for above in ("", "perplexity/", "eval-data/perplexity/")),
        group,
    )
    for group, version in VERSIONS.items()
}
"""Subfolders where a group may be; if no other group is requested, the folder itself may be it."""
FORMS = ("val.npy", "val/*.npy", "part-*.npy", "val.idx")
"""Contents of a set's folder; a set may also be one file of its name."""
SECTION = "evaluation.perplexity"
COLUMNS = 4  # of a piece
PIECES_AT_ONCE = 64  # requested from another store
WHITE_SPACE = re.compile(r"\s+")  # lm-eval's words are what is between
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
    eod_id: int | None
    """The id that ends its documents, if that is known; of a pair, whose index has their bounds, only for `rolling`."""

    @property
    def prefix(self) -> str:
        """Return the prefix of its manifest."""
        return self.index or npy_prefix(self.file.path)

    @property
    def stated(self) -> tuple[Manifest | PartManifest, TokenFiles] | None:
        """Return its manifest and the entry for it; None where there is none, or it is of another file."""
        suffix = NPY_SUFFIX if self.index is None else BIN_SUFFIX
        return manifest_of(self.prefix, suffix, self.file.tokens * self.file.dtype.itemsize)

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
    """A set that was found: its files, and how they are cut."""

    name: str
    files: tuple[TokenFile, ...]
    chunking: Chunking
    chunk_tokens: int
    """The most tokens of a piece; with `rolling` those that the model is given."""
    vocab_size: int
    """The model's vocabulary size: ids are below it."""
    most_tokens: int | None
    """Take pieces (with `rolling`, whole documents) from its beginning until there are so many tokens; None: take
    all."""
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
            pieces = self._first(np.concatenate([np.zeros((0, COLUMNS), np.int64), *cut]))
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
        texts = [np.insert(file.texts(), 0, number, axis=1) for number, file in enumerate(self.files)]
        return self._first(np.concatenate([np.zeros((0, 3), np.int64), *texts]))

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
    """Return [n] how many ids `read` returns of each piece."""
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
    """List what is missing of the named sets and groups, and where it was looked for; opens no file."""
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


def _places(config: PerplexityConfig, group: Group) -> tuple[str, ...]:
    """Sets of both groups have the same names: the folder itself can be one of them alone."""
    return (*PLACES[group], ".") if len(config.groups) == 1 else PLACES[group]


def _files_of(path: str) -> list[str]:
    """Return the .npy files and the prefixes of pairs that a path means: a file, a prefix, a folder or a glob."""
    if is_url(path):
        if path.endswith("/") or (path.endswith(NPY_SUFFIX) and glob.has_magic(path)):
            return listed(path, NPY_SUFFIX)
        return [path] if find(path if path.endswith(NPY_SUFFIX) else f"{path}.idx") is not None else []
    place = Path(path)
    if place.is_dir() and not idx_path(path).exists():
        matches = [str(found) for suffix in (NPY_SUFFIX, ".idx") for found in place.glob(f"*{suffix}")]
    elif glob.has_magic(path) and not place.exists():
        matches = glob.glob(path, recursive=True)
    else:
        matches = [path, f"{path}.idx", f"{path}{NPY_SUFFIX}"]
    pairs = {found.removesuffix(".bin").removesuffix(".idx") for found in matches if found.endswith((".idx", ".bin"))}
    found = [match for match in matches if match.endswith(NPY_SUFFIX) and Path(match).is_file()]
    return sorted({*found, *(prefix for prefix in pairs if idx_path(prefix).is_file())})


def _group_files(config: PerplexityConfig, group: Group, name: str) -> list[str]:
    """Return the files of the first place and form in which a group's set is found."""
    for place in _places(config, group):
        for spelling in SPELLINGS.get(name, (name,)):
            own = glob.escape(str(Path(config.folder or "") / place / spelling))
            for pattern in (*(f"{own}/{form}" for form in FORMS), f"{own}{NPY_SUFFIX}", f"{own}.idx"):
                if files := sorted(found for match in glob.glob(pattern) for found in _files_of(match)):
                    return files
    return []


def _named_files(config: PerplexityConfig) -> Iterator[tuple[str, list[str]]]:
    for group in config.groups:
        for name in SETS[group]:
            yield set_name(group, name), _group_files(config, group, name)
    for name, paths in config.sets.items():
        yield name, [file for path in paths for file in _files_of(path)]


def find_sets(
    config: PerplexityConfig,
    *,
    seq_length: int,
    vocab_size: int,
    end_of_text_id: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[PerplexitySet]:
    """Return the sets of a configuration, opened and checked: the groups' first, then the named ones.

    Args:
        seq_length: of the model: the longest piece that it may be given.
        vocab_size: of the model.
        end_of_text_id: the model's, which ends a document where neither `config` nor a manifest says what does.
        tokenizer: gives, where a set has no manifest, how many bytes its tokens are, and, where nothing else says it,
            what ends a document, if it has an id for that.

    Raises:
        InputError: sets are missing (all that are, one line each), empty, or of another vocabulary, or so is the end of
            text that leads documents; pieces are longer than the model's sequences.
        CorruptError: a file is damaged.
    """
    chunk = config.chunk_tokens or seq_length
    problems = [*config.problems(), *set_problems(config)]
    if chunk > seq_length:
        problems.append(
            f"{SECTION}.chunk_tokens is {chunk}, longer than the {seq_length} tokens that the model was trained on; "
            "set it to null, or lower"
        )
    if problems:
        raise InputError("\n".join(problems))
    sets = []
    ends = (end_of_text_id, None if tokenizer is None else tokenizer.eod_id)
    for name, paths in _named_files(config):
        files = tuple(_opened(path, config, ends) for path in paths)
        for file in files:
            refuse_largest_id(file.file.max_token_id, vocab_size, file.file.path)
        for file in files if config.chunking == "rolling" else ():  # no file holds the id that leads its documents
            if file.eod_id is not None and not 0 <= file.eod_id < vocab_size:
                raise InputError(
                    f"{file.file.path}: its documents end with id {file.eod_id}, which leads each and is outside the "
                    f"vocabulary of {vocab_size}; set {SECTION}.eod_id to the model's end of text"
                )
        each = PerplexitySet(
            name=name,
            files=files,
            chunking=config.chunking,
            chunk_tokens=chunk,
            vocab_size=vocab_size,
            most_tokens=config.limit_tokens,
        )
        sets.append(_with_text(each, tokenizer))
    return sets


def _opened(path: str, config: PerplexityConfig, ends: Sequence[int | None]) -> TokenFile:
    """Open a file; the ends of text are those of the model and its tokenizer, which need not have made the file."""
    if path.endswith(NPY_SUFFIX):
        (file,) = open_npy_files([path], config.npy_dtype)
    else:
        index = read_index(path, cache=cache_of(path))
        name = f"{path}.bin" if is_url(path) else str(bin_path(path))
        file = NpyFile(name, index.dtype, index.tokens, None, index.remote)
    opened = TokenFile(file=file, index=None if path.endswith(NPY_SUFFIX) else path, eod_id=None)
    stated = opened.stated
    if stated is not None:
        opened = dataclasses.replace(opened, file=dataclasses.replace(file, max_token_id=stated[1].max_token_id))
    known = (config.eod_id, stated[0].tokenizer.eod_id if stated is not None else None, *ends)
    return dataclasses.replace(opened, eod_id=next((end for end in known if end not in (None, NO_ID)), None))


# -- bytes and words


def _with_text(of: PerplexitySet, tokenizer: Tokenizer | None) -> PerplexitySet:
    """Return the set with the bytes of a token, by the manifests of its files or else decoded, and its words.

    The bytes are those of all files where these have manifests, else of what is scored. With `rolling`, they are those
    of the scored text as lm-eval counts them, and so are the words, which are always decoded.
    """
    pieces = of.pieces()  # raises for a set of which nothing can be scored
    scored, is_rolling = int(pieces[:, 3].sum()), of.chunking == "rolling"
    stated = None if is_rolling and of.most_tokens is not None else _stated_text(of.files)
    text_bytes = words = 0
    if tokenizer is not None and (is_rolling or stated is None):
        parts, skipped = (of.documents(), 0) if is_rolling else (pieces, 1)
        for text in _texts(of, parts, skipped, tokenizer):
            text_bytes += len(text.encode(errors="replace"))
            words += len(WHITE_SPACE.split(text)) if is_rolling else 0
    ratio = text_bytes / scored if stated is None else stated[0] / (scored if is_rolling else stated[1])
    return dataclasses.replace(of, bytes_per_token=ratio or None, words_per_token=words / scored or None)


def _stated_text(files: Sequence[TokenFile]) -> tuple[int, int] | None:
    """Return the bytes of the text, and the tokens, that the manifests of all files state."""
    text_bytes = tokens = 0
    for file in files:
        manifest = stated[0] if (stated := file.stated) is not None else None
        if not isinstance(manifest, Manifest) or not manifest.text_bytes:  # a part's, or of tokens without a text
            return None
        text_bytes, tokens = text_bytes + manifest.text_bytes, tokens + manifest.tokens
    return text_bytes, tokens


def _texts(of: PerplexitySet, parts: np.ndarray, skipped: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of pieces or documents without their first `skipped` tokens; the end of a document has none, nor
    has an id without a piece.
    """
    for first in range(0, len(parts), PIECES_AT_ONCE):
        some = parts[first : first + PIECES_AT_ONCE]
        ends = [NO_ID if (end := of.files[number].eod_id) is None else end for number in some[:, 0].tolist()]
        for piece, end in zip(side_by_side(of.read, some), ends, strict=True):
            ids = piece[skipped:]
            yield tokenizer.decode(ids[(ids != end) & (ids < tokenizer.vocab_size)].tolist())
