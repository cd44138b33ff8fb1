"""Perplexity sets: which files they are, and how their tokens are cut into pieces that are scored by themselves.

The paper's two groups are OLMo's. There is no package of them: whoever has them has them as OLMo lays them out, in one
of its ways (`PLACES`, `FORMS`). Nothing here imports torch.
"""

import dataclasses
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fanformer.data.id_bounds import refuse_ids_outside, refuse_ids_read
from megatron_fanformer.data.manifest import Manifest, read_any_manifest, token_files_record
from megatron_fanformer.data.npy_files import SUFFIX, NpyFile, npy_prefix, open_npy_files
from megatron_fanformer.data.remote_files import find, listed, read_together
from megatron_fanformer.data.token_files import bin_path, idx_path, read_index
from megatron_fanformer.data.tokenizer import NO_ID, Tokenizer
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.evaluation.config import Group, PerplexityConfig
from megatron_fanformer.runtime.device import cache_folder
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
PIECES_AT_ONCE = 64  # requested from another store


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
    """The id that ends its documents, if that is known."""

    @property
    def prefix(self) -> str:
        """Return the prefix of its manifest."""
        return self.index or npy_prefix(self.file.path)

    def document_starts(self) -> np.ndarray:
        """Return [documents + 1] int64: the token at which each document begins, and the number of tokens.

        Raises:
            InputError: it is not known what ends a document.
        """
        if self.index is not None:
            index = read_index(self.index, cache=cache_folder())
            return np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.bounds]
        if self.eod_id is None:
            raise InputError(
                f"{self.file.path} does not say where its documents end; set {SECTION}.eod_id, or chunking to tokens"
            )
        ends = np.flatnonzero(self.file.read(0, self.file.tokens) == self.eod_id) + 1
        return np.unique(np.concatenate([[0], ends, [self.file.tokens]]))


@dataclass(frozen=True, kw_only=True)
class PerplexitySet:
    """A set that was found: its files, and how they are cut."""

    name: str
    files: tuple[TokenFile, ...]
    by_documents: bool
    chunk_tokens: int
    """The most tokens of a piece."""
    vocab_size: int
    """The model's vocabulary size: ids are below it."""
    most_tokens: int | None
    """Take pieces from its beginning until there are so many tokens; None: take all."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the original text per token; None if not known."""

    def pieces(self) -> np.ndarray:
        """Return [n, 3] int64: file, first token and number of tokens of each piece. All but its first token are
        scored.

        Raises:
            InputError: there is none, or it is not known where documents end.
        """
        cut = _document_pieces if self.by_documents else _chunks
        found = [cut(number, file, self.chunk_tokens) for number, file in enumerate(self.files)]
        pieces = np.concatenate(found)
        if self.most_tokens is not None:
            pieces = pieces[np.cumsum(pieces[:, 2]) - pieces[:, 2] < self.most_tokens]
        if not len(pieces):
            tokens = sum(file.file.tokens for file in self.files)
            raise InputError(
                f"{self.name} holds {tokens} tokens in {len(self.files)} files and no piece of {self.chunk_tokens}; "
                f"set {SECTION}.chunk_tokens lower, or chunking to documents"
            )
        return pieces

    def read(self, piece: np.ndarray) -> np.ndarray:
        """Return [tokens] int64 of one row of `pieces`.

        Raises:
            CorruptError: a file has become shorter since it was found, or holds an id outside the vocabulary.
        """
        number, first, count = map(int, piece)
        file = self.files[number].file
        ids = file.read(first, count)
        refuse_ids_read(ids, self.vocab_size, file.path, first)
        return ids.astype(np.int64)


def _chunks(number: int, file: TokenFile, size: int) -> np.ndarray:
    """Return the paper's chunks: each file from its beginning, the rest dropped, so that all are of one length."""
    starts = np.arange(file.file.tokens // size, dtype=np.int64) * size
    return np.stack([np.full_like(starts, number), starts, np.full_like(starts, size)], axis=1)


def _document_pieces(number: int, file: TokenFile, size: int) -> np.ndarray:
    """Return documents; a longer one in pieces that share one token, so that each of its tokens but the first is scored
    once.

    A document of a single token has none that could be.
    """
    bounds = file.document_starts()
    lengths = np.diff(bounds)
    counts = np.maximum(lengths - 2, -1) // (size - 1) + 1
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + within * (size - 1)
    ends = np.minimum(np.repeat(bounds[1:], counts), starts + size)
    return np.stack([np.full_like(starts, number), starts, ends - starts], axis=1)


# -- finding them


def set_problems(config: PerplexityConfig) -> list[str]:
    """List what is missing of the named sets and groups, and where it was looked for; opens no file."""
    found = []
    for name, paths in config.sets.items():
        found += [f"{SECTION}.sets.{name}: {problem}" for path in paths if (problem := _missing(path))]
    if config.folder is None:
        return found
    if not Path(config.folder).is_dir():
        return [*found, f"{SECTION}.folder: {config.folder} is not a folder; name the one that holds a group's sets"]
    for group in config.groups:
        if missing := [name for name in SETS[group] if not _group_files(config, group, name)]:
            found.append(
                f"{SECTION}.folder: {config.folder} lacks {len(missing)} of the {len(SETS[group])} sets of {group} "
                f"({', '.join(missing)}), looked for as SET/{', SET/'.join(FORMS)}, SET.npy and SET.idx in "
                f"{', '.join(_places(config, group))}; copy them there, or name those that you have in {SECTION}.sets"
            )
    return found


def _places(config: PerplexityConfig, group: Group) -> tuple[str, ...]:
    """Sets of both groups have the same names: the folder itself can be one of them alone."""
    return (*PLACES[group], ".") if len(config.groups) == 1 else PLACES[group]


def _missing(path: str) -> str | None:
    if _files_of(path):
        return None
    if is_url(path):
        return f"{redacted(path)} holds no token files; name a .npy file, a pair's prefix, or a folder ending in /"
    if glob.has_magic(path):
        return f"{path} matches no .npy file and no .idx file; name token files"
    if Path(path).is_dir():
        return f"{path} holds no .npy file and no .idx file; name a folder of token files"
    return f"{path} does not exist; name a .npy file, or the prefix of a .bin and .idx pair"


def _files_of(path: str) -> list[str]:
    """Return the .npy files and the prefixes of pairs that a path means: a file, a prefix, a folder or a glob."""
    if is_url(path):
        if path.endswith("/") or (path.endswith(SUFFIX) and glob.has_magic(path)):
            return listed(path, SUFFIX)
        return [path] if find(path if path.endswith(SUFFIX) else f"{path}.idx") is not None else []
    place = Path(path)
    if place.is_dir() and not idx_path(path).exists():
        matches = [str(found) for suffix in (SUFFIX, ".idx") for found in place.glob(f"*{suffix}")]
    elif glob.has_magic(path) and not place.exists():
        matches = glob.glob(path, recursive=True)
    else:
        matches = [path, f"{path}.idx", f"{path}{SUFFIX}"]
    pairs = {found.removesuffix(".bin").removesuffix(".idx") for found in matches if found.endswith((".idx", ".bin"))}
    found = [match for match in matches if match.endswith(SUFFIX) and Path(match).is_file()]
    return sorted({*found, *(prefix for prefix in pairs if idx_path(prefix).is_file())})


def _group_files(config: PerplexityConfig, group: Group, name: str) -> list[str]:
    """Return the files of the first place and form in which a group's set is found."""
    for place in _places(config, group):
        for spelling in SPELLINGS.get(name, (name,)):
            own = glob.escape(str(Path(config.folder or "") / place / spelling))
            for pattern in (*(f"{own}/{form}" for form in FORMS), f"{own}{SUFFIX}", f"{own}.idx"):
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
    config: PerplexityConfig, *, seq_length: int, vocab_size: int, batch_tokens: int, tokenizer: Tokenizer | None = None
) -> list[PerplexitySet]:
    """Return the sets of a configuration, opened and checked: the groups' first, then the named ones.

    Args:
        seq_length: of the model: the longest piece that it may be given.
        vocab_size: of the model.
        batch_tokens: what `batches` counts in.
        tokenizer: tells, where a set has no manifest, how many bytes its tokens are, and what ends a document, if it
            has an id for that.

    Raises:
        InputError: sets are missing (all that are, one line each), empty, or of another vocabulary; pieces are longer
            than the model's sequences.
        CorruptError: a file is damaged.
    """
    chunk = config.chunk_tokens or seq_length
    found = [*config.problems(), *set_problems(config)]
    if chunk > seq_length:
        found.append(
            f"{SECTION}.chunk_tokens is {chunk}, longer than the {seq_length} tokens that the model was trained on; "
            "set it to null, or lower"
        )
    if found:
        raise InputError("\n".join(found))
    sets = []
    for name, paths in _named_files(config):
        files = tuple(_opened(path, config, tokenizer) for path in paths)
        for file in (each.file for each in files if each.file.remote is None or each.file.max_token_id is not None):
            refuse_ids_outside(
                vocab_size, file.path, Path(file.path), file.dtype, largest=file.max_token_id, cache=None
            )
        each = PerplexitySet(
            name=name,
            files=files,
            by_documents=config.chunking == "documents",
            chunk_tokens=chunk,
            vocab_size=vocab_size,
            most_tokens=None if config.batches is None else config.batches * batch_tokens,
        )
        sets.append(_with_bytes(each, tokenizer))
    return sets


def _opened(path: str, config: PerplexityConfig, tokenizer: Tokenizer | None) -> TokenFile:
    if not path.endswith(SUFFIX):
        index = read_index(path, cache=cache_folder())
        record = token_files_record(path)
        largest = record.max_token_id if record is not None else None
        name = f"{path}.bin" if is_url(path) else str(bin_path(path))
        tokens = NpyFile(name, index.dtype, index.tokens, largest, index.remote)
        return TokenFile(file=tokens, index=path, eod_id=None)
    (file,) = open_npy_files([path], config.npy_dtype, cache=cache_folder())
    eod_id, manifest = config.eod_id, read_any_manifest(npy_prefix(path))
    if eod_id is None and (source := manifest.tokenizer if manifest else tokenizer) is not None:
        eod_id = None if source.eod_id == NO_ID else source.eod_id
    return TokenFile(file=file, index=None, eod_id=eod_id)


# -- bytes


def _with_bytes(found: PerplexitySet, tokenizer: Tokenizer | None) -> PerplexitySet:
    """Return the set with the bytes of a token: those of all its files by their manifests, else of what is scored,
    decoded.
    """
    pieces = found.pieces()  # raises for a set of which nothing can be scored
    ratio = _stated_bytes_per_token(found.files)
    if ratio is None and tokenizer is not None:
        ratio = _decoded_bytes(found, pieces, tokenizer) / int((pieces[:, 2] - 1).sum())
    return dataclasses.replace(found, bytes_per_token=ratio or None)


def _stated_bytes_per_token(files: Sequence[TokenFile]) -> float | None:
    text_bytes = tokens = 0
    for file in files:
        manifest = read_any_manifest(file.prefix)
        if not isinstance(manifest, Manifest) or not manifest.text_bytes:  # a part's, or of tokens without a text
            return None
        text_bytes, tokens = text_bytes + manifest.text_bytes, tokens + manifest.tokens
    return text_bytes / tokens


def _decoded_bytes(found: PerplexitySet, pieces: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return UTF-8 bytes of the tokens that are scored; the end of a document has none, nor has an id without a
    piece.
    """
    total = 0
    for first in range(0, len(pieces), PIECES_AT_ONCE):
        some = pieces[first : first + PIECES_AT_ONCE]
        for piece in read_together(lambda some=some: [found.read(each) for each in some]):  # type: ignore[misc]
            ids = piece[1:]
            ids = ids[(ids != tokenizer.eod_id) & (ids < tokenizer.vocab_size)]
            total += len(tokenizer.decode(ids.tolist()).encode(errors="replace"))
    return total
