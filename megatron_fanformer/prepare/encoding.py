"""Token ids of documents, and of token files: by gigatoken where it can be trusted, by the exact library elsewhere.

Two libraries that implement one tokenizer differ in the characters that later versions of Unicode added, and in how
those combine. So each character is given to both, and a text with one that makes a difference goes to the exact
library. Both are then compared on texts that are known to be hard, and, while documents are encoded, on samples.

Texts are UTF-8 bytes here: gigatoken takes them as they are; Python strings cost as much again to join and convert.
Worker processes are spawned and import this module, so nothing here may import torch or megatron-core: that would cost
each of them seconds.
"""

import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, compress, count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron_fanformer.data.manifest import Encoding, Settings, TokenizerRecord
from megatron_fanformer.data.token_files import NUMPY_MAGIC
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import naming
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare.documents import Block, DocumentParser, Refusal, parse_block
from megatron_fanformer.prepare.verb import Backend

GIGATOKEN = "gigatoken"
# gigatoken caches every word that it meets. Once it has taken this much memory it is loaded again, but not before
# this much text has gone through, so that the cost of loading does not matter.
CACHE_BYTES = 160 << 20
CACHE_TEXT_BYTES = 16 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Less input is encoded sooner than gigatoken is compared with the exact library, which takes half a second.
SMALL_INPUT_BYTES = 4 << 20
SMALL_INPUT = "the input is small"
MAX_DOUBTFUL_PIECES = 8  # each is searched for in every text
# In one of every so many blocks, the first document, or so much of it, is also encoded by the exact library.
CHECKED_BLOCKS = 8
CHECKED_CHARACTERS = 4_000
# A text of more characters is cut, at these places: no library joins a word to the space that follows it.
PIECE_CHARACTERS = 1 << 18
CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])")
ASCII = 127
CODE_POINTS = 0x110000
# The parts of the planes that texts are made of: everything else is rare, and always goes to the exact library.
PROBED = (range(0, 0xD800), range(0xF900, 0x10000), range(0x1D400, 0x1D800), range(0x1F000, 0x1FC00))
# Between letters and digits: reveals its class. Between U+0345 and U+0334, whose combining classes are the highest
# and the lowest: a character with a class between them is reordered with one.
SURROUNDINGS = "a{0}b 1{0}2 a\u0345{0}\u0334"
ROW = 64  # characters that are tried together first, which is faster
BLOCK_TOKENS = 1 << 22
# A file without any end of text was made by another tokenizer, and must not be held in memory as one document.
MAX_DOCUMENT_TOKENS = 1 << 26

EncodeAll = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Returns the ids of each text."""


class Gigatoken:
    """gigatoken, on the calling thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._load()

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text."""
        self._text_left -= sum(map(len, texts))
        if self._text_left < 0 and _resident_bytes() > self._resident_limit:
            self._load()
        # One by one: its encode_batch imports awkward, for 0.6 s of CPU, and saves some 2 µs for a text.
        return [self._tokenizer.encode(text) for text in texts]

    def _load(self) -> None:
        # Imported here: whoever does without gigatoken need not wait for it.
        import gigatoken

        data = self._path.read_bytes()
        load = gigatoken.Tokenizer.from_json if self._path.suffix == ".json" else gigatoken.Tokenizer.from_sentencepiece
        self._tokenizer: Any = None  # frees the one before first
        self._tokenizer = load(data)
        self._text_left = CACHE_TEXT_BYTES
        self._resident_limit = _resident_bytes() + CACHE_BYTES


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


@dataclass(frozen=True)
class Trust:
    """The texts that gigatoken is trusted with."""

    characters: np.ndarray
    """[0x110000] bool: the trusted characters."""
    doubtful_pieces: list[bytes]
    """Special pieces that it encodes differently where a text contains them literally."""

    def covers(self, text: bytes) -> bool:
        """Return whether gigatoken is trusted with a text."""
        if any(piece in text for piece in self.doubtful_pieces):
            return False
        if text.isascii():
            return True
        data = np.frombuffer(text, np.uint8)
        beyond_ascii = data[data > ASCII].tobytes().decode().encode("utf-32-le")
        return bool(self.characters[np.frombuffer(beyond_ascii, np.uint32)].all())


class IdEncoder:
    """Encodes texts on one thread: by gigatoken those that it is trusted with, the others by the exact library.

    The exact library takes up to 170 bytes per byte of text, so a long text goes through it in pieces, cut before
    single spaces between words, unless cuts at all such places change the ids of its beginning.
    """

    def __init__(self, exact: Tokenizer, fast: Gigatoken | None = None, trust: Trust | None = None) -> None:
        self.exact = exact
        self._fast, self._trust = fast, trust

    def encode_block(self, number: int, texts: Sequence[bytes], name: str) -> list[np.ndarray]:
        """Return the ids of each text of a file's `number`-th block, whose first document is called `name`.

        Raises:
            InputError: the exact library gives other ids to the first text.
        """
        if self._fast is not None and texts and number % CHECKED_BLOCKS == 0:
            beginning = texts[0].decode()[:CHECKED_CHARACTERS]
            if self.encode_batch([beginning.encode()])[0].tolist() != self.exact.encode(beginning):
                raise InputError(
                    f"gigatoken's ids differ from the exact library's in {name}; remove the output's .parts folder, "
                    "and prepare with --backend tokenizers or sentencepiece"
                )
        return self.encode_batch(texts)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, in an unsigned type."""
        if self._fast is None or self._trust is None:
            return self._encode_exactly(texts)
        trusted = list(map(self._trust.covers, texts))
        fast = iter(self._fast.encode_batch(list(compress(texts, trusted))))
        exact = iter(
            self._encode_exactly([text for text, is_trusted in zip(texts, trusted, strict=True) if not is_trusted])
        )
        return [next(fast if is_trusted else exact) for is_trusted in trusted]

    def _encode_exactly(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode() for text in texts]
        short = iter(self.exact.encode_batch([text for text in decoded if len(text) <= PIECE_CHARACTERS]))
        return [
            np.array(next(short), np.uint32) if len(text) <= PIECE_CHARACTERS else self._encode_long(text)
            for text in decoded
        ]

    def _encode_long(self, text: str) -> np.ndarray:
        beginning, pieces = text[:PIECE_CHARACTERS], [text]
        words = self.exact.encode_batch(list(_pieces(beginning, 1)))
        if list(chain.from_iterable(words)) == self.exact.encode(beginning):
            pieces = list(_pieces(text, PIECE_CHARACTERS))
        return np.concatenate([np.array(self.exact.encode(piece), np.uint32) for piece in pieces])


def _pieces(text: str, length: int) -> Iterator[str]:
    """Yield the text in pieces of at least `length` characters, except the last."""
    start = 0
    while cut := CUT.search(text, start + length):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


# -- the choice of a library


@dataclass(frozen=True)
class EncoderChoice:
    """The library that computes the ids; all that a process needs to make its own encoder."""

    tokenizer: str
    eod_id: int
    encoding: Encoding
    trust: Trust | None = None
    """Texts that gigatoken is trusted with; None where it is not used."""

    def make(self) -> IdEncoder:
        """Return an encoder for the calling thread alone."""
        exact = load_tokenizer(self.tokenizer, eod_id=self.eod_id)
        return IdEncoder(exact, Gigatoken(exact.path) if self.trust else None, self.trust)


def choose_encoder(tokenizer: Tokenizer, backend: Backend, input_bytes: int) -> EncoderChoice:
    """Choose the library that computes the ids of `tokenizer`, and compare gigatoken with the exact one.

    `auto` uses gigatoken if it can read the tokenizer and there is enough input to be worth the comparison. If its
    ids differ on texts that are known to be hard, the exact library is used instead, and the choice says why.

    Raises:
        InputError: the backend is not this tokenizer's, or cannot read it.
    """
    exact = "tokenizers" if tokenizer.path.suffix == ".json" else "sentencepiece"

    def choice(backend: str, reason: str | None = None, trust: Trust | None = None) -> EncoderChoice:
        encoding = Encoding(backend=backend, reason=reason)
        return EncoderChoice(str(tokenizer.path), tokenizer.eod_id, encoding, trust)

    if backend not in ("auto", GIGATOKEN):
        if backend != exact:
            raise InputError(f"backend {backend} does not read {tokenizer.path}; use {exact}, {GIGATOKEN} or auto")
        return choice(exact)
    if backend == "auto" and input_bytes < SMALL_INPUT_BYTES:
        return choice(exact, SMALL_INPUT)
    trust = trust_or_reason(tokenizer)
    if isinstance(trust, Trust):
        return choice(GIGATOKEN, trust=trust)
    if backend == GIGATOKEN:
        raise InputError(f"gigatoken cannot be used for {tokenizer.path} ({trust}); set backend to auto")
    return choice(exact, trust)


def trust_or_reason(exact: Tokenizer) -> Trust | str:
    """Return the texts that gigatoken is trusted with, or the reason not to use it; takes half a second."""
    if find_spec(GIGATOKEN) is None:
        return "gigatoken is not installed; pip install 'megatron_fanformer[fast]'"
    try:
        fast = Gigatoken(exact.path)
        pieces = [p for p in exact.special_pieces if not all(_same(_with_piece(p), _rows(fast), exact.encode_batch))]
        if len(pieces) > MAX_DOUBTFUL_PIECES:
            return f"gigatoken takes {len(pieces)} special pieces otherwise, {pieces[0]!r} first"
        trust = Trust(trusted_characters(_rows(fast), exact.encode_batch), [piece.encode() for piece in pieces])
        if not trust.characters[: ASCII + 1].all():
            return "gigatoken's ids differ on ASCII characters"
        texts = list(hard_texts(exact.special_pieces))
        same = _same(texts, _rows(IdEncoder(exact, fast, trust)), exact.encode_batch)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its panics are not subclasses of Exception
        return f"gigatoken cannot read it: {' '.join(str(error).split())}"
    return trust if all(same) else f"gigatoken's ids differ on {texts[same.index(False)][:40]!a}"


def trusted_characters(fast: EncodeAll, exact: EncodeAll) -> np.ndarray:
    """Return [0x110000] bool: the characters that both libraries treat alike."""
    trusted = np.zeros(CODE_POINTS, bool)
    codes = list(chain.from_iterable(PROBED))
    rows = [codes[start : start + ROW] for start in range(0, len(codes), ROW)]
    texts = [[SURROUNDINGS.format(chr(code)) for code in row] for row in rows]
    for row, singles, is_same in zip(rows, texts, _same(["".join(row) for row in texts], fast, exact), strict=True):
        trusted[row] = True if is_same else _same(singles, fast, exact)
    return trusted


def _with_piece(piece: str) -> list[str]:
    return [piece, f"x{piece}y", f" {piece} ", piece + piece, piece[:-1], f"{piece}\u0301"]


def _same(texts: Sequence[str], fast: EncodeAll, exact: EncodeAll) -> list[bool]:
    return [list(one) == list(other) for one, other in zip(fast(texts), exact(texts), strict=True)]


def _rows(encoder: Gigatoken | IdEncoder) -> EncodeAll:
    return lambda texts: [row.tolist() for row in encoder.encode_batch([text.encode() for text in texts])]


def hard_texts(pieces: Sequence[str]) -> Iterator[str]:
    """Yield texts on which tokenizers go wrong, also with the special pieces in them; the same on every call."""
    yield from chain.from_iterable(map(_with_piece, pieces))
    yield from ("", " ", "\r\n", "a\r\nb\r\n\r\n c\r", "\ta\t\tb", "\x00\x01 abc\x7f\x80\x9f", "\u2028\u2029\x85")
    yield from ("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪🇫🇷🇮", "'s 't 're 've 'm 'll 'd 'S 'LL ''s")
    for part in ("a", " ", "\n", "\t ", "é", "日本語", "1", "!?", "\u0301", "a\u0301\u0323", "ab "):
        yield part * 5_000
    chance = random.Random(0)
    yield from (" ".join(map(chr, chance.sample(range(0x10000, CODE_POINTS), 600))) for _ in range(16))
    pool = "Aa '.,0\n\r\t\x00\x7f\xa0\xad\xbd\xe9\u0300\u0301\u0323\u0345\u05d0\u0627\u0661\u0966\u1100\u1161\u11a8"
    pool += "\uac00\u2028\u200d\u2160\u3000\u3042\u4e00\ufe0f\ufeff\U0001f600\U0010ffff"
    yield from ("".join(chance.choices(pool, k=chance.randrange(1, 40))) for _ in range(1_000))


# -- blocks of a file


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """The result of one block of lines: lines == documents + refusals."""

    lines: int
    tokens: np.ndarray
    """The documents' tokens one after the other, each ended by the end-of-text id; conversations end as rendered."""
    lengths: np.ndarray
    """[documents] int32: the tokens of each, including the end-of-text id."""
    numbers: list[int]
    """Each document's line in the block, from 0."""
    ids: Sequence[str | None]
    sources: Sequence[str | None]
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    refusals: list[tuple[int, str]]
    """Refused lines: the line in the block, from 0, and the reason."""
    mask: np.ndarray | None = None
    """For conversations, [tokens] uint8: 1 where the token is learned."""
    learned: Sequence[int] = ()
    """For conversations: learned tokens of each."""
    is_cut: Sequence[bool] = ()
    """For conversations: whether each lost its end."""


def encoded_block(outcomes: Sequence[Any], **tokens: Any) -> EncodedBlock:
    """Return the result of a block, of the outcome of each of its lines and the facts about its tokens."""
    kept = [(number, one) for number, one in enumerate(outcomes) if not isinstance(one, Refusal)]
    return EncodedBlock(
        lines=len(outcomes),
        numbers=[number for number, _ in kept],
        ids=[one.id for _, one in kept],
        sources=[one.source for _, one in kept],
        refusals=[(number, one.reason) for number, one in enumerate(outcomes) if isinstance(one, Refusal)],
        **tokens,
    )


class BlockEncoder:
    """Parse and tokenize blocks of documents, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        self.parser = DocumentParser(settings.text_field)
        self._encoder = choice.make()
        self._eod_id = choice.eod_id
        self._dtype = np.dtype(settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the documents of `block`, the file's `number`-th, in order."""
        outcomes = parse_block(block, self.parser)
        documents = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
        texts = [document.text.encode() for document in documents]
        name = f"document {documents[0].id!r}" if documents else ""
        rows = self._encoder.encode_block(number, texts, name)
        lengths = np.array([len(row) + 1 for row in rows], np.int32)
        tokens = np.full(lengths.sum(dtype=np.int64), self._eod_id, self._dtype)
        for row, end in zip(rows, np.cumsum(lengths, dtype=np.int64).tolist(), strict=True):
            tokens[end - 1 - len(row) : end - 1] = row
        return encoded_block(outcomes, tokens=tokens, lengths=lengths, text_bytes=sum(map(len, texts)))


def encode_blocks(encoders: Sequence[Any], blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
    """Yield the encoded blocks of a file, in order, by a thread for each encoder; a few are in progress at a time."""
    if len(encoders) == 1:
        yield from map(encoders[0].encode, count(), blocks)
        return
    free: SimpleQueue[Any] = SimpleQueue()
    for encoder in encoders:
        free.put(encoder)

    def encode(number: int, block: Block) -> EncodedBlock:
        encoder = free.get()
        try:
            return encoder.encode(number, block)
        finally:
            free.put(encoder)

    under_way: deque[Future[EncodedBlock]] = deque()
    with ThreadPoolExecutor(len(encoders)) as pool:
        for number, block in enumerate(blocks):
            under_way.append(pool.submit(encode, number, block))
            if len(under_way) > len(encoders):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


# -- token files


def npy_blocks(path: Path, settings: Settings, tokenizer: TokenizerRecord) -> Iterator[EncodedBlock]:
    """Yield a token file's documents in blocks of whole ones, cut after each end-of-text id; a document is a line.

    Tokens after the last end of text are a document too.

    Raises:
        CorruptError: the file's size is not a multiple of the token size.
        InputError: the file has a NumPy header, or an id outside the vocabulary.
    """
    dtype = np.dtype(settings.npy_dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a whole number of {dtype.name} tokens;"
            " copy it again, or set npy_dtype to its type"
        )
    with naming(path), path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise InputError(f"{path} has a NumPy header; name headerless token files, as tofile writes them")
    tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    start = 0
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[at : at + BLOCK_TOKENS]
        if (largest := int(block.max())) >= tokenizer.vocab_size:
            raise InputError(
                f"{path} holds token id {largest}, outside the tokenizer's vocabulary of {tokenizer.vocab_size};"
                " name the tokenizer that made the tokens"
            )
        ends = at + 1 + np.flatnonzero(block == tokenizer.eod_id)
        if len(ends) == 0 and at - start > MAX_DOCUMENT_TOKENS:
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
    nothing = [None] * len(lengths)
    return EncodedBlock(
        lines=len(lengths),
        tokens=tokens.astype(dtype),
        lengths=lengths.astype(np.int32),
        numbers=list(range(len(lengths))),
        ids=nothing,
        sources=nothing,
        text_bytes=0,
        refusals=[],
    )
