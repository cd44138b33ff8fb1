"""Agreement of a fast tokenizer with the exact one: where their ids are the same, found by running both.

Two libraries that implement one tokenizer differ where their Unicode tables differ in age: in the characters
that later versions added, and in how those combine. So each character is given to both, in contexts that
reveal its class, its composition and its combining class; characters that make a difference are not trusted,
and a document that contains one goes to the exact tokenizer. Both are then run once more on what remains,
including whole texts that are known to be hard.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)
# The parts of the planes that texts are made of: everything else is rare, and always goes to the exact tokenizer.
PROBED = (range(0, 0x10000), range(0x1D400, 0x1D800), range(0x1F000, 0x1FC00))
BLOCK = 256
# Between letters and digits: reveals its class. Between U+0345 and U+0334, whose combining classes are the highest
# and the lowest: a character with a class between them is reordered with one.
SURROUNDINGS = ("a{}b 1{}2 ", "a\u0345{}\u0334")

# The ids of each text. gigatoken has a cost per call, so many texts go into one.
EncodeAll = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def trusted_characters(fast: EncodeAll, exact: EncodeAll) -> np.ndarray:
    """Return [0x110000] bool: the characters that both tokenizers treat alike."""
    blocks = [
        [code for code in range(start, min(start + BLOCK, part.stop)) if code not in SURROGATES]
        for part in PROBED
        for start in range(part.start, part.stop, BLOCK)
    ]
    trusted = np.zeros(CODE_POINTS, bool)
    for block, alike in zip(blocks, _alike(blocks, fast, exact), strict=True):
        trusted[block] = True
        if not alike:
            trusted[_differing(block, fast, exact)] = False
    return trusted


def _differing(codes: list[int], fast: EncodeAll, exact: EncodeAll) -> list[int]:
    """Return the codes that make a difference; all of them if they do so only together."""
    half = len(codes) // 2
    if not half:
        return codes
    halves = [codes[:half], codes[half:]]
    found = [
        code
        for part, alike in zip(halves, _alike(halves, fast, exact), strict=True)
        if not alike
        for code in _differing(part, fast, exact)
    ]
    return found or codes


def _alike(groups: list[list[int]], fast: EncodeAll, exact: EncodeAll) -> list[bool]:
    """Return for each group of codes whether the two agree on every text made of it."""
    texts = [text for codes in groups for text in _texts_of(codes)]
    same = _same(texts, fast, exact)
    each = 1 + len(SURROUNDINGS)
    return [all(same[start : start + each]) for start in range(0, len(same), each)]


def _texts_of(codes: list[int]) -> list[str]:
    characters = list(map(chr, codes))
    return ["".join(characters), *("".join(map(form.format, characters, characters)) for form in SURROUNDINGS)]


def _same(texts: Sequence[str], fast: EncodeAll, exact: EncodeAll) -> list[bool]:
    return [list(one) == list(other) for one, other in zip(fast(texts), exact(texts), strict=True)]


def doubtful_pieces(fast: EncodeAll, exact: EncodeAll, pieces: Sequence[str]) -> list[str]:
    """Return the special pieces on which the two differ where a text contains them literally."""
    texts = [text for piece in pieces for text in _with_piece(piece)]
    wrong = {text for text, same in zip(texts, _same(texts, fast, exact), strict=True) if not same}
    return [piece for piece in pieces if not wrong.isdisjoint(_with_piece(piece))]


def _with_piece(piece: str) -> list[str]:
    return [piece, f"x{piece}y", f" {piece} ", piece + piece, piece[:-1], f"{piece}\u0301"]


def first_difference(fast: EncodeAll, exact: EncodeAll, pieces: Sequence[str] = ()) -> str | None:
    """Return a text to which the two give different ids; None if they agree on all hard texts.

    `pieces` are the tokenizer's special pieces.
    """
    texts = list(hard_texts(pieces))
    return next((text for text, same in zip(texts, _same(texts, fast, exact), strict=True) if not same), None)


def hard_texts(pieces: Sequence[str] = ()) -> Iterator[str]:
    """Texts on which tokenizers go wrong; the same on every call."""
    yield from ("", " ", "  ", "\n", "\r\n", "a\r\nb\r\n\r\n c\r", "\ta\t\tb", "\x00", "\x00\x01 abc\x7f\x80\x9f")
    for piece in pieces:
        yield from _with_piece(piece)
    yield from ("e\u0301", "A\u030a", "\u1e9b\u0323", "\ufb01", "\u212b", "\u1100\u1161\u11a8", "\uac00\u11a8")
    yield from ("q\u0307\u0323", "\u0e01\u0e33", "\u0627\u064b\u0651", "a\u0315\u0300\u05ae\u0062", "\u0344\u2126")
    yield from ("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪🇫🇷🇮", "\u200b\u200c\u200d\ufeff")
    yield from ("'s 't 're 've 'm 'll 'd 'S 'LL ''s", "\u2028\u2029\x85", "\u00a0\u3000\u2003x", "\ufeffabc")
    yield from ("a" * 50_000, " " * 50_000, "\n" * 20_000, "\t " * 5_000, "é" * 20_000, "日本語" * 10_000)
    yield from ("1" * 5_000, "1234567890" * 500, "!?" * 5_000, "\u0301" * 300, "a\u0301\u0323" * 1_000)
    yield from ("ab " * 10_000, "\U0010ffff\ufffd\ufffe")
    for plane in range(0, CODE_POINTS, 0x10000):
        codes = [code for code in range(plane + 0x40, plane + 0x10000, 0x61) if code not in SURROGATES]
        yield " ".join(map(chr, codes))
    yield from _random_texts()


def _random_texts(number: int = 1_000) -> Iterator[str]:
    """Short texts of characters whose neighbours matter: letters, marks, digits, spaces, joiners, controls."""
    chance = random.Random(0)
    pool = "Aa '.,0\n\r\t\x00\x7f\xa0\xad\xbd\xe9\u0300\u0301\u0323\u0345\u05d0\u0627\u0661\u0966\u1100\u1161\u11a8"
    pool += "\uac00\u2028\u200d\u2160\u3000\u3042\u4e00\ufe0f\ufeff\U0001f600\U0010ffff"
    for _ in range(number):
        yield "".join(chance.choices(pool, k=chance.randrange(1, 40)))
