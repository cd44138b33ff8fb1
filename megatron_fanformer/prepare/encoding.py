"""Token ids of documents and of token files.

gigatoken is several times as fast as the exact library (tokenizers or sentencepiece), but the two differ on characters
that later versions of Unicode added, and on how these combine. So both are given each character when it is first seen,
and a text with a character on which they differ goes to the exact library. Both are also compared on texts that are
known to be hard and, while documents are encoded, on samples.

Spawned workers import this module, so it must not import torch or megatron-core: that would cost each of them seconds.
"""

import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil

from megatron_fanformer.data.manifest import Encoding, Settings, TokenizerRecord
from megatron_fanformer.data.token_files import NUMPY_MAGIC
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import naming
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare.documents import Block, DocumentParser, Refusal, parse_block
from megatron_fanformer.prepare.verb import Backend

GIGATOKEN = "gigatoken"
# gigatoken caches every word. To free the cache, gigatoken is loaded again if it has taken so much more memory; this is
# looked at after so much text each time, beside which loading costs little.
CACHE_BYTES = 160 << 20
CACHE_TEXT_BYTES = 16 << 20
# Less input is not worth the third of a second in which gigatoken is compared with the exact library.
SMALL_INPUT_BYTES = 4 << 20
SMALL_INPUT = "the input is small"
MAX_DOUBTFUL_PIECES = 8  # every text is searched for all of them
# In every CHECKED_BLOCKS-th block, the exact library also encodes the first CHECKED_CHARACTERS of the first document.
CHECKED_BLOCKS = 8
CHECKED_CHARACTERS = 4_000
# A text of more characters is cut between a word and the space after it, which hardly any tokenizer joins.
PIECE_CHARACTERS = 1 << 18
CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])")
ASCII = 127
# The characters given to both libraries. All others are rare, and always go to the exact library.
PROBED = np.r_[:0xD800, 0xF900:0x10000, 0x1D400:0x1D800, 0x1F000:0x1FC00]
# Letters and digits around a character reveal its category. U+0345 and U+0334 have the highest and the lowest combining
# class: between them, a character that combines changes places with one of the two.
SURROUNDINGS = "a{0}b 1{0}2 a\u0345{0}\u0334"
COMPARED = 64  # so many characters are compared together, and one by one only if the ids differ
DOUBTED, UNSEEN, TRUSTED = range(3)
BLOCK_TOKENS = 1 << 22
# A longer document means that another tokenizer made the file, all of which would be held in memory: it is an error.
MAX_DOCUMENT_TOKENS = 1 << 26

EncodeAll = Callable[[Sequence[str]], Sequence[Iterable[Any]]]
"""Takes texts, and returns the ids of each."""


class Gigatoken:
    """A tokenizer of the library gigatoken, for one thread; it bounds the memory of the library's cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._load()

    def _load(self) -> None:
        import gigatoken  # an optional dependency

        load = gigatoken.Tokenizer.from_json if self._path.suffix == ".json" else gigatoken.Tokenizer.from_sentencepiece
        self._tokenizer: Any = None  # frees the old cache before the new one grows
        self._tokenizer = load(self._path.read_bytes()).backend
        self._text_left = CACHE_TEXT_BYTES
        self._resident_limit = psutil.Process().memory_info().rss + CACHE_BYTES

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        self._text_left -= sum(map(len, texts))
        if self._text_left < 0:
            self._text_left = CACHE_TEXT_BYTES
            if psutil.Process().memory_info().rss > self._resident_limit:
                self._load()
        return list(map(self._tokenizer.encode, texts))


class Trust:
    """Knows which texts gigatoken encodes as the exact library does; compares both on characters that are new to it."""

    def __init__(self, fast: EncodeAll, exact: EncodeAll, doubtful_pieces: Sequence[str]) -> None:
        self._fast, self._exact, self._doubtful_pieces = fast, exact, doubtful_pieces
        self.characters = np.full(sys.maxunicode + 1, DOUBTED, np.uint8)
        self.characters[PROBED] = UNSEEN

    def covers(self, texts: Sequence[str]) -> bool:
        """Return whether gigatoken is trusted with all of these texts."""
        if any(piece in text for piece in self._doubtful_pieces for text in texts):
            return False
        if not (characters := "".join(text for text in texts if not text.isascii())):
            return True
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        codes = codes[codes > ASCII]
        if (marks := self.characters[codes]).all():  # none is doubted
            unseen = np.unique(codes[marks == UNSEEN])
            for compared in (unseen[start : start + COMPARED] for start in range(0, len(unseen), COMPARED)):
                probes = list(map(SURROUNDINGS.format, map(chr, compared)))
                are_all_equal = all(_compare(["".join(probes)], self._fast, self._exact))
                are_trusted = are_all_equal or _compare(probes, self._fast, self._exact)
                self.characters[compared] = np.where(are_trusted, TRUSTED, DOUBTED)
        return bool((self.characters[codes] == TRUSTED).all())


class IdEncoder:
    """Encodes texts on one thread, by gigatoken if it is trusted with them, otherwise by the exact library.

    The exact library takes up to 170 bytes of memory per byte of text. So it is given a long text in pieces, cut before
    single spaces between words, unless such a cut at every word changes the ids of the text's beginning.
    """

    def __init__(self, exact: Tokenizer, fast: Gigatoken | None = None, doubtful_pieces: Sequence[str] = ()) -> None:
        self.exact, self._fast = exact, fast
        self._trust = Trust(fast.encode, exact.encode_batch, doubtful_pieces) if fast else None

    def encode_block(self, number: int, texts: Sequence[str], name: str) -> list[np.ndarray]:
        """Return the ids of each text in block `number`, from 0; in some, compare both libraries on the first text.

        `name` is the first document's, for the error message. Raises InputError if the two libraries differ.
        """
        beginnings = [text[:CHECKED_CHARACTERS] for text in texts[:1] if self._fast and number % CHECKED_BLOCKS == 0]
        if not all(_compare(beginnings, self.encode, self.exact.encode_batch)):
            raise InputError(
                f"gigatoken's ids differ from the exact library's in {name}; remove the output's .parts folder, "
                "and prepare with --backend tokenizers or sentencepiece"
            )
        return self.encode(texts)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, in an unsigned type."""
        if self._fast and self._trust and self._trust.covers(texts):
            return self._fast.encode(texts)
        if len(texts) == 1:
            return [self._encode_exactly(texts[0])]
        return [ids for text in texts for ids in self.encode([text])]

    def _encode_exactly(self, text: str) -> np.ndarray:
        beginning, pieces = text[:PIECE_CHARACTERS], [text]
        if len(text) > PIECE_CHARACTERS:
            ids_of_words = self.exact.encode_batch(list(_cut(beginning, 1)))
            if list(chain.from_iterable(ids_of_words)) == self.exact.encode(beginning):
                pieces = list(_cut(text, PIECE_CHARACTERS))
        return np.concatenate([np.array(self.exact.encode(piece), np.uint32) for piece in pieces])


def _cut(text: str, length: int) -> Iterator[str]:
    """Cut a text before single spaces between words; yield pieces of at least `length` characters, except the last."""
    start = 0
    while cut := CUT.search(text, start + length):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


# -- the choice of a library


@dataclass(frozen=True)
class EncoderChoice:
    """The library that computes the ids, and what a worker process needs to load it."""

    tokenizer: str
    eod_id: int
    encoding: Encoding
    doubtful_pieces: Sequence[str] = ()
    """Special pieces on which gigatoken differs if a text contains them literally."""

    def make_encoder(self) -> IdEncoder:
        """Load the library; return an encoder for one thread."""
        exact = load_tokenizer(self.tokenizer, eod_id=self.eod_id)
        fast = Gigatoken(exact.path) if self.encoding.backend == GIGATOKEN else None
        return IdEncoder(exact, fast, self.doubtful_pieces)


def choose_encoder(tokenizer: Tokenizer, backend: Backend, input_bytes: int) -> EncoderChoice:
    """Choose the library that computes the ids.

    `auto` stands for gigatoken, except for small inputs, or if gigatoken cannot read the tokenizer, or gives hard texts
    other ids than the exact library. The result then says why gigatoken was not chosen.

    Raises InputError if the stated backend cannot read the tokenizer, or gigatoken is stated and gives other ids.
    """
    exact = "tokenizers" if tokenizer.path.suffix == ".json" else "sentencepiece"

    def choice(backend: str, reason: str | None = None, doubtful: Sequence[str] = ()) -> EncoderChoice:
        return EncoderChoice(str(tokenizer.path), tokenizer.eod_id, Encoding(backend=backend, reason=reason), doubtful)

    if backend not in ("auto", GIGATOKEN):
        if backend != exact:
            raise InputError(f"backend {backend} does not read {tokenizer.path}; use {exact}, {GIGATOKEN} or auto")
        return choice(exact)
    if backend == "auto" and input_bytes < SMALL_INPUT_BYTES:
        return choice(exact, SMALL_INPUT)
    doubtful_or_reason = compare_gigatoken(tokenizer)
    if not isinstance(doubtful_or_reason, str):
        return choice(GIGATOKEN, doubtful=doubtful_or_reason)
    if backend == GIGATOKEN:
        raise InputError(f"gigatoken cannot be used for {tokenizer.path} ({doubtful_or_reason}); set backend to auto")
    return choice(exact, reason=doubtful_or_reason)


def compare_gigatoken(exact: Tokenizer) -> list[str] | str:
    """Return the special pieces that gigatoken is not trusted with, or the reason not to use it."""
    if find_spec(GIGATOKEN) is None:
        return "gigatoken is not installed; pip install 'megatron_fanformer[fast]'"
    try:
        fast, pieces = Gigatoken(exact.path), exact.special_pieces
        equal_on = {piece: _compare(_texts_around(piece), fast.encode, exact.encode_batch) for piece in pieces}
        doubtful_pieces = [piece for piece, are_equal in equal_on.items() if not all(are_equal)]
        if len(doubtful_pieces) > MAX_DOUBTFUL_PIECES:
            return f"gigatoken takes {len(doubtful_pieces)} special pieces otherwise, {doubtful_pieces[0]!r} first"
        texts = list(hard_texts(pieces))
        are_equal = _compare(texts, IdEncoder(exact, fast, doubtful_pieces).encode, exact.encode_batch)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # gigatoken's panics are not subclasses of Exception
        return f"gigatoken cannot read it: {' '.join(str(error).split())}"
    return doubtful_pieces if all(are_equal) else f"gigatoken's ids differ on {texts[are_equal.index(False)][:40]!a}"


def _compare(texts: Sequence[str], fast: EncodeAll, exact: EncodeAll) -> list[bool]:
    """Return, for each text, whether both libraries give the same ids."""
    return [list(fast_ids) == list(ids) for fast_ids, ids in zip(fast(texts), exact(texts), strict=True)]


def _texts_around(piece: str) -> list[str]:
    return [piece, f"x{piece}y", f" {piece} ", piece + piece, piece[:-1], f"{piece}\u0301"]


def hard_texts(pieces: Sequence[str]) -> Iterator[str]:
    """Yield texts that tokenizers often get wrong, some with these special pieces; the same texts on every call."""
    yield from chain.from_iterable(map(_texts_around, pieces))
    yield from map("a{0}b 1{0}2 {0}".format, map(chr, range(ASCII + 1)))  # `Trust` takes these for granted
    yield from ("", " ", "\r\n", "a\r\nb\r\n\r\n c\r", "\ta\t\tb", "\x00\x01 abc\x7f\x80\x9f", "\u2028\u2029\x85")
    yield from ("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪🇫🇷🇮", "'s 't 're 've 'm 'll 'd 'S 'LL ''s")
    yield from (
        part * 5_000 for part in ("a", " ", "\n", "\t ", "é", "日本語", "1", "!?", "\u0301", "a\u0301\u0323", "ab ")
    )
    chance = random.Random(0)
    yield from (" ".join(map(chr, chance.sample(range(0x10000, sys.maxunicode + 1), 600))) for _ in range(16))
    pool = "Aa '.,0\n\r\t\x00\x7f\xa0\xad\xbd\xe9\u0300\u0301\u0323\u0345\u05d0\u0627\u0661\u0966\u1100\u1161\u11a8"
    pool += "\uac00\u2028\u200d\u2160\u3000\u3042\u4e00\ufe0f\ufeff\U0001f600\U0010ffff"
    yield from ("".join(chance.choices(pool, k=chance.randrange(1, 40))) for _ in range(1_000))


# -- blocks of a file


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """The encoded documents of a block of lines, and its refused lines: lines == documents + refusals."""

    lines: int
    tokens: np.ndarray
    """All ids, one document after the other; a document ends with the end-of-text id, a conversation as rendered."""
    lengths: np.ndarray
    """[documents] int32: the number of ids of each document, with the end-of-text id."""
    numbers: list[int]
    """The number of each document's line in the block, from 0."""
    ids: Sequence[str | None]
    sources: Sequence[str | None]
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    refusals: list[tuple[int, str]]
    """The number of each refused line in the block, from 0, and the reason."""
    mask: np.ndarray | None = None
    """For conversations, [tokens] uint8: 1 for a token that is learned, otherwise 0."""
    learned: Sequence[int] = ()
    """For conversations: the number of learned tokens in each."""
    is_cut: Sequence[bool] = ()
    """For conversations: whether the end of each was cut off."""


def encoded_block(outcomes: Sequence[Any], **token_fields: Any) -> EncodedBlock:
    """Return a block of these `token_fields`; its other fields come from `outcomes`: a document or refusal per line."""
    documents = {number: outcome for number, outcome in enumerate(outcomes) if not isinstance(outcome, Refusal)}
    return EncodedBlock(
        lines=len(outcomes),
        numbers=list(documents),
        ids=[document.id for document in documents.values()],
        sources=[document.source for document in documents.values()],
        refusals=[(number, outcome.reason) for number, outcome in enumerate(outcomes) if isinstance(outcome, Refusal)],
        **token_fields,
    )


class BlockEncoder:
    """Parses and tokenizes blocks of documents, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        self.parser = DocumentParser(settings.text_field)
        self._encoder = choice.make_encoder()
        self._end = np.array([choice.eod_id], settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the documents of a file's block; blocks are numbered from 0."""
        outcomes = parse_block(block, self.parser)
        documents = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
        texts = [document.text for document in documents]
        rows = self._encoder.encode_block(number, texts, f"document {documents[0].id!r}" if documents else "")
        lengths = np.array(list(map(len, rows)), np.int32) + 1
        pieces = [self._end[:0], *(piece for row in rows for piece in (row, self._end))]
        return encoded_block(
            outcomes,
            tokens=np.concatenate(pieces, dtype=self._end.dtype),
            lengths=lengths,
            text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        )


def encode_blocks(encoders: Sequence[Any], blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
    """Encode the blocks of a file, with one thread for each encoder; yield the results in the order of the blocks."""
    if len(encoders) == 1:
        yield from map(encoders[0].encode, count(), blocks)
        return
    idle_encoders: SimpleQueue[Any] = SimpleQueue()
    for encoder in encoders:
        idle_encoders.put(encoder)

    def encode(number: int, block: Block) -> EncodedBlock:
        """Encode a block with an encoder that no other thread uses."""
        encoder = idle_encoders.get()
        try:
            return encoder.encode(number, block)
        finally:
            idle_encoders.put(encoder)

    in_progress: deque[Future[EncodedBlock]] = deque()
    with ThreadPoolExecutor(len(encoders)) as pool:
        for number, block in enumerate(blocks):
            in_progress.append(pool.submit(encode, number, block))
            if len(in_progress) > len(encoders):
                yield in_progress.popleft().result()
        while in_progress:
            yield in_progress.popleft().result()


# -- token files


def npy_blocks(path: Path, settings: Settings, tokenizer: TokenizerRecord) -> Iterator[EncodedBlock]:
    """Yield the documents of a headerless token file, in blocks of whole documents; each document counts as a line.

    A document ends after an end-of-text id; the file's last document may also end with the file.

    Raises:
        CorruptError: the file's size is not a multiple of the token size.
        InputError: the file has a NumPy header, an id outside the vocabulary, or no end-of-text id over a long range.
    """
    dtype = np.dtype(settings.npy_dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a whole number of {dtype.name} tokens; copy it again, or set npy_dtype"
        )
    with naming(path), path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise InputError(f"{path} has a NumPy header; name headerless token files, as tofile writes them")
    tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    start = 0  # the first token of the next document
    for block_start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[block_start : block_start + BLOCK_TOKENS]
        if (largest := int(block.max())) >= tokenizer.vocab_size:
            raise InputError(
                f"{path} holds token id {largest}, outside the tokenizer's vocabulary of {tokenizer.vocab_size};"
                " name the tokenizer that made the tokens"
            )
        ends = block_start + 1 + np.flatnonzero(block == tokenizer.eod_id)  # just after each id
        if len(ends) == 0 and block_start - start > MAX_DOCUMENT_TOKENS:
            raise InputError(
                f"{path} has no end-of-text id {tokenizer.eod_id} in more than {MAX_DOCUMENT_TOKENS} tokens;"
                " state the id that ends its documents by --eod-id"
            )
        if len(ends):
            yield _token_block(tokens[start : ends[-1]], np.diff(ends, prepend=start), settings.dtype)
            start = int(ends[-1])
    if start < len(tokens):
        yield _token_block(tokens[start:], np.array([len(tokens) - start]), settings.dtype)


def _token_block(tokens: np.ndarray, lengths: np.ndarray, dtype: str) -> EncodedBlock:
    """Return an encoded block of documents that have no text, id or source; each counts as a line."""
    return EncodedBlock(
        lines=len(lengths),
        tokens=tokens.astype(dtype),
        lengths=lengths.astype(np.int32),
        numbers=list(range(len(lengths))),
        ids=[None] * len(lengths),
        sources=[None] * len(lengths),
        text_bytes=0,
        refusals=[],
    )
