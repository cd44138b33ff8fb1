"""From batches of texts to token ids: by gigatoken where it can be trusted, exactly elsewhere.

Two libraries that implement one tokenizer differ where their Unicode tables differ in age: in the characters that
later versions added, and in how those combine. So each character is given to both, and a text with one that makes a
difference goes to the exact library. Both are then compared on texts that are known to be hard, and, while documents
are encoded, on samples of them (`encoding.CheckedEncoder`).

Texts are UTF-8 bytes here: gigatoken takes them as they are; Python strings cost as much again to join and convert.
"""

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.manifest import Encoding
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.verb import Backend

GIGATOKEN = "gigatoken"

# gigatoken caches every word that it meets. Once it has taken this much memory it is loaded again, but not before
# this much text has gone through, so that the cost of loading does not matter.
CACHE_BYTES = 160 << 20
CACHE_TEXT_BYTES = 16 << 20
# Less input is encoded sooner than gigatoken is compared with the exact library, which takes a second.
SMALL_INPUT_BYTES = 4 << 20
SMALL_INPUT = "the input is small"
MAX_DOUBTFUL_PIECES = 8  # each is searched for in every text
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A text of more characters is cut, at these places: no library joins a word to the space that follows it.
PIECE_CHARACTERS = 1 << 18
CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])")
ASCII = 127
CODE_POINTS = 0x110000
# The parts of the planes that texts are made of: everything else is rare, and always goes to the exact library.
PROBED = (range(0, 0xD800), range(0xF900, 0x10000), range(0x1D400, 0x1D800), range(0x1F000, 0x1FC00))
# Ideographs and syllables, which are all alike, and do not combine: they are tried without surroundings, for speed.
UNIFORM = (range(0x3400, 0xA000), range(0xAC00, 0xD7A4))
# Between letters and digits: reveals its class. Between U+0345 and U+0334, whose combining classes are the highest
# and the lowest: a character with a class between them is reordered with one.
ROW = 64  # characters that are tried together first, which is faster
SURROUNDINGS = "a{0}b 1{0}2 a\u0345{0}\u0334"

EncodeAll = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Returns the ids of each text."""


class ExactEncoder:
    """Encodes by the library that defines the tokenizer.

    It takes up to 170 bytes per byte of text, so a long text goes through it in pieces, cut before single spaces
    between words, unless cuts at all such places change the ids of its beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text."""
        pieces = [text]
        if len(text) > PIECE_CHARACTERS:
            beginning = text[:PIECE_CHARACTERS]
            words = self._tokenizer.encode_batch(list(_pieces(beginning, 1)))
            if list(chain.from_iterable(words)) == self._tokenizer.encode(beginning):
                pieces = list(_pieces(text, PIECE_CHARACTERS))
        return np.concatenate([np.array(self._tokenizer.encode(piece), np.uint32) for piece in pieces])

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, in an unsigned type."""
        decoded = [text.decode() for text in texts]
        short = iter(self._tokenizer.encode_batch([text for text in decoded if len(text) <= PIECE_CHARACTERS]))
        return [
            np.array(next(short), np.uint32) if len(text) <= PIECE_CHARACTERS else self.encode(text) for text in decoded
        ]


class Gigatoken:
    """gigatoken alone, on the calling thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._load()

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """As ExactEncoder's."""
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


@dataclass(frozen=True)
class Trust:
    """The texts that gigatoken is trusted with."""

    characters: np.ndarray
    """[0x110000] bool: the trusted characters."""
    doubtful_pieces: list[str]
    """Special pieces that it encodes differently where a text contains them literally."""


class RoutedEncoder:
    """gigatoken for the texts that it is trusted with, the exact tokenizer for the others."""

    def __init__(self, fast: Gigatoken, exact: Tokenizer, trust: Trust) -> None:
        self._fast = fast
        self._exact = ExactEncoder(exact)
        self._trusted = trust.characters
        self._doubtful_pieces = [piece.encode() for piece in trust.doubtful_pieces]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """As ExactEncoder's."""
        trusted = list(map(self._is_trusted, texts))
        fast = iter(self._fast.encode_batch(list(compress(texts, trusted))))
        return [
            next(fast) if ok else self._exact.encode(text.decode()) for text, ok in zip(texts, trusted, strict=True)
        ]

    def _is_trusted(self, text: bytes) -> bool:
        if any(piece in text for piece in self._doubtful_pieces):
            return False
        if text.isascii():
            return True
        data = np.frombuffer(text, np.uint8)
        beyond_ascii = data[data > ASCII].tobytes().decode().encode("utf-32-le")
        return bool(self._trusted[np.frombuffer(beyond_ascii, np.uint32)].all())


IdEncoder = ExactEncoder | Gigatoken | RoutedEncoder


@dataclass(frozen=True)
class EncoderChoice:
    """The choice of encoder; all that a process needs to make its own."""

    tokenizer: str
    eod_id: int
    encoding: Encoding
    trust: Trust | None
    """Texts that gigatoken is trusted with; None where it is not used."""

    def make(self) -> IdEncoder:
        """Return an encoder for the calling thread alone."""
        exact = self.exact()
        if self.trust is None:
            return ExactEncoder(exact)
        return RoutedEncoder(Gigatoken(exact.path), exact, self.trust)

    def exact(self) -> Tokenizer:
        """Return the tokenizer that defines the ids."""
        return load_tokenizer(self.tokenizer, eod_id=self.eod_id)

    def without_gigatoken(self, reason: str | None) -> "EncoderChoice":
        """Return the same ids by the exact tokenizer, because of `reason`."""
        backend = "tokenizers" if self.tokenizer.endswith(".json") else "sentencepiece"
        return EncoderChoice(self.tokenizer, self.eod_id, Encoding(backend=backend, reason=reason), None)


def choose_encoder(tokenizer: Tokenizer, backend: Backend, input_bytes: int) -> EncoderChoice:
    """Choose the library that computes the ids of `tokenizer`, and compare gigatoken with the exact one.

    `auto` uses gigatoken if it can read the tokenizer and there is enough input to be worth the comparison. If its
    ids differ on texts that are known to be hard, the exact library is used instead, and the choice says why.

    Raises InputError for a backend that is not this tokenizer's, or that cannot read it.
    """
    fast = EncoderChoice(str(tokenizer.path), tokenizer.eod_id, Encoding(backend=GIGATOKEN), None)
    exact = fast.without_gigatoken(None)
    if backend not in ("auto", GIGATOKEN):
        if backend != exact.encoding.backend:
            raise InputError(
                f"backend {backend} does not read {tokenizer.path}; use {exact.encoding.backend}, {GIGATOKEN} or auto"
            )
        return exact
    if backend == "auto" and input_bytes < SMALL_INPUT_BYTES:
        return exact.without_gigatoken(SMALL_INPUT)
    trust = trust_or_reason(exact.exact())
    if isinstance(trust, Trust):
        return replace(fast, trust=trust)
    if backend == GIGATOKEN:
        raise InputError(f"gigatoken cannot be used for {tokenizer.path} ({trust}); set backend to auto")
    return exact.without_gigatoken(trust)


def trust_or_reason(exact: Tokenizer) -> Trust | str:
    """Return the texts that gigatoken is trusted with, or why it must not be used; takes a second."""
    if find_spec(GIGATOKEN) is None:
        return "gigatoken is not installed; pip install 'megatron_fanformer[fast]'"
    try:
        fast = Gigatoken(exact.path)
        pieces = doubtful_pieces(_rows(fast), exact)
        if len(pieces) > MAX_DOUBTFUL_PIECES:
            return f"gigatoken takes {len(pieces)} special pieces otherwise, {pieces[0]!r} first"
        trust = Trust(trusted_characters(_rows(fast), exact.encode_batch), pieces)
        if not trust.characters[: ASCII + 1].all():
            return "gigatoken's ids differ on ASCII characters"
        texts = list(hard_texts(exact.special_pieces))
        same = _same(texts, _rows(RoutedEncoder(fast, exact, trust)), exact.encode_batch)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its panics are not subclasses of Exception
        return f"gigatoken cannot read it: {' '.join(str(error).split())}"
    return trust if all(same) else f"gigatoken's ids differ on {texts[same.index(False)][:40]!a}"


def trusted_characters(fast: EncodeAll, exact: EncodeAll) -> np.ndarray:
    """Return [0x110000] bool: the characters that both libraries treat alike."""
    codes = list(chain.from_iterable(PROBED))
    forms = ("{0}" if any(code in part for part in UNIFORM) else SURROUNDINGS for code in codes)
    texts = np.array([form.format(chr(code)) for form, code in zip(forms, codes, strict=True)], object)
    rows = np.array_split(np.arange(len(codes)), len(codes) // ROW)
    alike = _same(["".join(texts[row]) for row in rows], fast, exact)
    trusted = np.zeros(CODE_POINTS, bool)
    trusted[codes] = True
    for row in (row for row, is_alike in zip(rows, alike, strict=True) if not is_alike):
        trusted[np.array(codes)[row]] = _same(list(texts[row]), fast, exact)
    return trusted


def doubtful_pieces(fast: EncodeAll, exact: Tokenizer) -> list[str]:
    """Return the special pieces on which the two differ where a text contains them literally."""
    return [piece for piece in exact.special_pieces if not all(_same(_with_piece(piece), fast, exact.encode_batch))]


def _with_piece(piece: str) -> list[str]:
    return [piece, f"x{piece}y", f" {piece} ", piece + piece, piece[:-1], f"{piece}\u0301"]


def _same(texts: Sequence[str], fast: EncodeAll, exact: EncodeAll) -> list[bool]:
    return [list(one) == list(other) for one, other in zip(fast(texts), exact(texts), strict=True)]


def _rows(encoder: IdEncoder) -> EncodeAll:
    return lambda texts: [row.tolist() for row in encoder.encode_batch([text.encode() for text in texts])]


def hard_texts(pieces: Sequence[str]) -> Iterator[str]:
    """Yield texts on which tokenizers go wrong, also with the special pieces in them; the same on every call."""
    yield from chain.from_iterable(map(_with_piece, pieces))
    yield from ("", " ", "  ", "\n", "\r\n", "a\r\nb\r\n\r\n c\r", "\ta\t\tb", "\x00", "\x00\x01 abc\x7f\x80\x9f")
    yield from ("e\u0301", "A\u030a", "\u1e9b\u0323", "\ufb01", "\u212b", "\u1100\u1161\u11a8", "\uac00\u11a8")
    yield from ("q\u0307\u0323", "\u0e01\u0e33", "\u0627\u064b\u0651", "a\u0315\u0300\u05ae\u0062", "\u0344\u2126")
    yield from ("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪🇫🇷🇮", "\u200b\u200c\u200d\ufeff")
    yield from ("'s 't 're 've 'm 'll 'd 'S 'LL ''s", "\u2028\u2029\x85", "\u00a0\u3000\u2003x", "\ufeffabc")
    for part in ("a", " ", "\n", "\t ", "é", "日本語", "1", "!?", "\u0301", "a\u0301\u0323", "ab "):
        yield part * 5_000
    chance = random.Random(0)
    yield from (" ".join(map(chr, chance.sample(range(0x10000, CODE_POINTS), 600))) for _ in range(16))
    pool = "Aa '.,0\n\r\t\x00\x7f\xa0\xad\xbd\xe9\u0300\u0301\u0323\u0345\u05d0\u0627\u0661\u0966\u1100\u1161\u11a8"
    pool += "\uac00\u2028\u200d\u2160\u3000\u3042\u4e00\ufe0f\ufeff\U0001f600\U0010ffff"
    yield from ("".join(chance.choices(pool, k=chance.randrange(1, 40))) for _ in range(1_000))


def _pieces(text: str, length: int) -> Iterator[str]:
    """Yield the text in pieces of at least `length` characters, except the last."""
    start = 0
    while found := CUT.search(text, start + length):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
