"""From batches of texts to token ids in one buffer: by gigatoken where it can be trusted, exactly elsewhere.

Texts are UTF-8 bytes here: gigatoken takes them as they are; Python strings cost as much again to join and convert.
"""

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from megatron_fanformer.data.manifest import Encoding
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import regular_file, sha256_of, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation import agreement
from megatron_fanformer.preparation.agreement import (
    CODE_POINTS,
    doubtful_pieces,
    first_difference,
    hard_texts,
    trusted_characters,
)
from megatron_fanformer.preparation.verb import Backend
from megatron_fanformer.runtime.device import cache_folder

GIGATOKEN = "gigatoken"

# gigatoken caches every word that it meets. Once it has taken this much memory it is loaded again, but not before
# this much text has gone through, so that the cost of loading does not matter.
CACHE_BYTES = 160 << 20
CACHE_TEXT_BYTES = 16 << 20
# What returns the ids of a batch imports awkward, for 0.6 s of CPU, and takes as long as up to 256 texts one by one, by
# measurement. More texts than that take some 2 µs longer each one by one, which is less than the import for the first.
SINGLY, FIRST_SINGLY = 256, 100_000
# Less input is encoded sooner than gigatoken is checked against the exact library, which takes seconds.
SMALL_INPUT_BYTES = 4 << 20
SMALL_INPUT = "the input is small"
# Each is searched for in every text.
MAX_DOUBTFUL_PIECES = 8
MOST_TRUST_BYTES = 1 << 20  # of a remembered one, which has a bit for each character
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A text of more characters is cut, at these places: no library joins a word to the space that follows it.
PIECE_CHARACTERS = 1 << 18
CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])")
# Characters beyond ASCII are looked up in slices of this many, to bound the memory.
SLICE = 1 << 16
ASCII = 127


class IdEncoder(Protocol):
    """Computes the ids of texts."""

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all texts (unsigned), and the number of ids of each (int64)."""


class ExactEncoder:
    """Encodes by the library that defines the tokenizer.

    It takes up to 170 bytes per byte of text, so a long text goes through it in pieces, cut before single spaces
    between words, unless cuts at all such places change the ids of a hard text, or of this one's beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._may_cut: bool | None = None

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text."""
        if len(text) <= PIECE_CHARACTERS or not self._cuts_change_nothing(text[:PIECE_CHARACTERS]):
            return np.array(self._tokenizer.encode(text), np.uint32)
        return np.concatenate(
            [np.array(self._tokenizer.encode(piece), np.uint32) for piece in _pieces(text, PIECE_CHARACTERS)]
        )

    def _cuts_change_nothing(self, beginning: str) -> bool:
        if self._may_cut is None:
            self._may_cut = all(map(self._stays_when_cut, hard_texts(self._tokenizer.special_pieces)))
        return self._may_cut and self._stays_when_cut(beginning)

    def _stays_when_cut(self, text: str) -> bool:
        pieces = self._tokenizer.encode_batch(list(_pieces(text, 1)))
        return list(chain.from_iterable(pieces)) == self._tokenizer.encode(text)

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """See IdEncoder."""
        decoded = [text.decode() for text in texts]
        short = iter(self._tokenizer.encode_batch([text for text in decoded if len(text) <= PIECE_CHARACTERS]))
        arrays = [
            np.array(next(short), np.uint32) if len(text) <= PIECE_CHARACTERS else self.encode(text) for text in decoded
        ]
        counts = np.array([len(array) for array in arrays], np.int64)
        return np.concatenate(arrays) if arrays else np.empty(0, np.uint32), counts


class Gigatoken:
    """gigatoken alone, on the calling thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts = 0
        self._load()

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """See IdEncoder."""
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        self._text_left -= sum(map(len, texts))
        if self._text_left < 0 and _resident_bytes() > self._resident_limit:
            self._load()
        self._texts += len(texts)
        if len(texts) <= SINGLY or self._texts <= FIRST_SINGLY:
            each = [self._tokenizer.encode(text) for text in texts]
            return np.concatenate(each), np.array([len(ids) for ids in each], np.int64)
        rows = self._tokenizer.encode_batch(list(texts), parallel=False).layout
        offsets = rows.offsets.data
        return rows.content.data[offsets[0] : offsets[-1]], np.diff(offsets)

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

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """See IdEncoder."""
        doubtful = self._doubtful(texts)
        if not doubtful:
            return self._fast.encode_batch(texts)
        ids, counts = self._fast.encode_batch([text for at, text in enumerate(texts) if at not in doubtful])
        pieces = iter(np.split(ids, np.cumsum(counts)[:-1]) if len(counts) else [])
        rows = [self._exact.encode(text.decode()) if at in doubtful else next(pieces) for at, text in enumerate(texts)]
        return np.concatenate(rows), np.array([len(row) for row in rows], np.int64)

    def _doubtful(self, texts: Sequence[bytes]) -> set[int]:
        """Return the positions of texts that contain a character or a piece that is not trusted."""
        doubtful = {at for piece in self._doubtful_pieces for at, text in enumerate(texts) if piece in text}
        wide = [at for at, text in enumerate(texts) if not text.isascii()]
        if wide and not self._all_trusted(b"".join([texts[at] for at in wide])):
            doubtful.update(at for at in wide if not self._all_trusted(texts[at]))
        return doubtful

    def _all_trusted(self, text: bytes) -> bool:
        data = np.frombuffer(text, np.uint8)
        beyond_ascii = data[data > ASCII].tobytes().decode()
        return all(
            self._trusted[np.frombuffer(beyond_ascii[start : start + SLICE].encode("utf-32-le"), np.uint32)].all()
            for start in range(0, len(beyond_ascii), SLICE)
        )


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

    def without_gigatoken(self, reason: str) -> "EncoderChoice":
        """Return the same ids by the exact tokenizer, because of `reason`."""
        return EncoderChoice(
            self.tokenizer, self.eod_id, Encoding(backend=_exact_backend(Path(self.tokenizer)), reason=reason), None
        )


def choose_encoder(tokenizer: Tokenizer, backend: Backend, input_bytes: int) -> EncoderChoice:
    """Choose what computes the ids of `tokenizer`, and check gigatoken against the exact library.

    `auto` uses gigatoken if it can read the tokenizer and there is enough input to be worth the check. If its
    ids differ on texts that are known to be hard, the exact library is used instead, and the choice says why.

    Raises InputError for a backend that is not this tokenizer's, or that cannot read it.
    """
    exact = EncoderChoice(str(tokenizer.path), tokenizer.eod_id, Encoding(backend=_exact_backend(tokenizer.path)), None)
    if backend not in ("auto", GIGATOKEN):
        if backend != exact.encoding.backend:
            raise InputError(
                f"backend {backend} does not read {tokenizer.path}; use {exact.encoding.backend}, {GIGATOKEN} or auto"
            )
        return exact
    if backend == "auto" and input_bytes < SMALL_INPUT_BYTES:
        return exact.without_gigatoken(SMALL_INPUT)
    trust = trust_or_reason(tokenizer.path, tokenizer.eod_id, tokenizer.path.stat().st_mtime_ns)
    if isinstance(trust, Trust):
        return EncoderChoice(exact.tokenizer, exact.eod_id, Encoding(backend=GIGATOKEN), trust)
    if backend == GIGATOKEN:
        raise InputError(f"gigatoken cannot be used for {tokenizer.path} ({trust}); set backend to auto")
    return exact.without_gigatoken(trust)


@lru_cache(maxsize=8)
def trust_or_reason(path: Path, eod_id: int, _modified_ns: int) -> Trust | str:
    """Return what gigatoken is trusted with, or why it must not be used.

    Takes seconds, but for a tokenizer that this user has had checked by the same versions, on such a processor.
    """
    if find_spec(GIGATOKEN) is None:
        return "gigatoken is not installed; pip install 'megatron_fanformer[fast]'"
    remembered = _remembered_trust_file(path, eod_id)
    trust = _read_trust(remembered) or _checked(path, eod_id)
    if isinstance(trust, Trust) and not remembered.exists():
        _write_trust(remembered, trust)
    return trust


def _checked(path: Path, eod_id: int) -> Trust | str:
    exact = load_tokenizer(path, eod_id=eod_id)
    pieces = exact.special_pieces
    try:
        fast = Gigatoken(path)
        doubtful = doubtful_pieces(_rows(fast), exact.encode_batch, pieces)
        if len(doubtful) > MAX_DOUBTFUL_PIECES:
            return f"gigatoken takes {len(doubtful)} special pieces otherwise, {doubtful[0]!r} first"
        trust = Trust(trusted_characters(_rows(fast), exact.encode_batch), doubtful)
        if not trust.characters[: ASCII + 1].all():
            return "gigatoken's ids differ on ASCII characters"
        difference = first_difference(_rows(RoutedEncoder(fast, exact, trust)), exact.encode_batch, pieces)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its panics are not subclasses of Exception
        return f"gigatoken cannot read it: {' '.join(str(error).split())}"
    return trust if difference is None else f"gigatoken's ids differ on {difference[:40]!a}"


class _TrustRecord(msgspec.Struct, frozen=True):
    characters: bytes
    """A bit for each."""
    doubtful_pieces: list[str]


def _remembered_trust_file(path: Path, eod_id: int) -> Path:
    """Return the file for a tokenizer's trust; all that decides it is in the name."""
    decides = [sha256_of(path), str(eod_id), platform.machine()]
    decides += [version(name) for name in (GIGATOKEN, "tokenizers", "sentencepiece")]
    decides += [sha256_of(source) for source in (Path(__file__), Path(agreement.__file__))]
    with suppress(OSError):  # gigatoken takes another way on another processor
        decides += [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    return cache_folder() / GIGATOKEN / f"{hashlib.sha256(' '.join(decides).encode()).hexdigest()[:32]}.json"


def _read_trust(file: Path) -> Trust | None:
    try:
        content = regular_file(file, most_bytes=MOST_TRUST_BYTES).read_bytes()
        record = msgspec.json.decode(content, type=_TrustRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    characters = np.unpackbits(np.frombuffer(record.characters, np.uint8)).astype(bool)
    return Trust(characters, record.doubtful_pieces) if len(characters) == CODE_POINTS else None


def _write_trust(file: Path, trust: Trust) -> None:
    record = _TrustRecord(np.packbits(trust.characters).tobytes(), trust.doubtful_pieces)
    with suppress(OSError):  # then the next command checks it again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, msgspec.json.encode(record))


def _rows(encoder: IdEncoder) -> Callable[[Sequence[str]], list[list[int]]]:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids, counts = encoder.encode_batch([text.encode() for text in texts])
        return [row.tolist() for row in np.split(ids, np.cumsum(counts)[:-1])]

    return encode


def _exact_backend(path: Path) -> str:
    return "tokenizers" if path.suffix == ".json" else "sentencepiece"


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
