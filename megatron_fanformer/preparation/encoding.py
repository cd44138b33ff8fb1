"""From blocks of documents to token buffers, and the threads that share one file's blocks.

Worker processes are spawned and import this module, so nothing here may import torch or megatron-core: that
would cost each of them seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from megatron_fanformer.preparation.document_files import Block
from megatron_fanformer.preparation.documents import DocumentParser, DocumentRules
from megatron_fanformer.preparation.id_encoders import EncoderChoice

# In one of every so many blocks, the first document, or so much of it, is also encoded by the exact tokenizer.
CHECKED_BLOCKS = 8
CHECKED_CHARACTERS = 4_000


class TokenizersDisagree(Exception):
    """The fast tokenizer gave other ids than the exact one; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What is learned of a block's conversations."""

    mask: np.ndarray
    """[tokens] uint8: 1 where the token is learned."""
    counts: np.ndarray
    """[documents] int32: the tokens of each that are."""
    is_cut: np.ndarray
    """[documents] bool: whether it lost its end."""


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
    ids: list[str | None]
    sources: list[str | None]
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    refusals: list[tuple[int, str]]
    """Line in the block, from 0, and reason."""
    learned: Learned | None = None
    """Where the documents are conversations."""


class CheckedEncoder:
    """Encodes the texts of blocks, and compares some of the ids with the exact tokenizer's."""

    def __init__(self, choice: EncoderChoice) -> None:
        self._encoder = choice.make()
        self._exact = choice.exact() if choice.trust is not None else None

    def encode(self, number: int, texts: Sequence[bytes], name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids and counts of the texts of the file's `number`-th block; see IdEncoder.

        Raises TokenizersDisagree if the exact tokenizer gives other ids to the first text, which it calls `name`.
        """
        ids, counts = self._encoder.encode_batch(texts)
        if self._exact is not None and texts and number % CHECKED_BLOCKS == 0:
            text = texts[0].decode()
            beginning = text[:CHECKED_CHARACTERS]
            fast = ids[: counts[0]] if beginning == text else self._encoder.encode_batch([beginning.encode()])[0]
            if fast.tolist() != self._exact.encode(beginning):
                raise TokenizersDisagree(name)
        return ids, counts


class FileBlockEncoder(Protocol):
    """Parses and tokenizes blocks, on one thread at a time: BlockEncoder, or ChatEncoder."""

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the documents of `block`, the file's `number`-th, in order. May raise TokenizersDisagree."""


class BlockEncoder:
    """Parses and tokenizes blocks of documents."""

    def __init__(self, choice: EncoderChoice, rules: DocumentRules, dtype: str) -> None:
        self._parser = DocumentParser(rules)
        self._encoder = CheckedEncoder(choice)
        self._eod_id = choice.eod_id
        self._dtype = np.dtype(dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """See FileBlockEncoder."""
        parsed = block.parse(self._parser)
        documents = parsed.documents
        texts = [document.text.encode() for document in documents]
        ids, counts = self._encoder.encode(number, texts, f"document {documents[0].id!r}" if documents else "")
        return EncodedBlock(
            lines=parsed.lines,
            tokens=self._with_ends(ids, counts),
            lengths=(counts + 1).astype(np.int32),
            numbers=parsed.numbers,
            ids=[document.id for document in documents],
            sources=[document.source for document in documents],
            text_bytes=sum(map(len, texts)),
            refusals=parsed.refusals,
        )

    def _with_ends(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """`ids` with an end-of-text id after each document's."""
        tokens = np.empty(len(ids) + len(counts), self._dtype)
        start = 0
        for number, end in enumerate(np.cumsum(counts).tolist()):
            tokens[start + number : end + number] = ids[start:end]
            tokens[end + number] = self._eod_id
            start = end
        return tokens


class EncodingThreads:
    """Encodes a file's blocks on one thread or several, each with its own encoder; order is kept."""

    def __init__(self, make: Callable[[], FileBlockEncoder], threads: int) -> None:
        self._threads = threads
        self._free: SimpleQueue[FileBlockEncoder] = SimpleQueue()
        for _ in range(threads):
            self._free.put(make())
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def encode(self, blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
        """The encoded blocks, in order; a few are in progress at a time."""
        if self._pool is None:
            yield from map(self._encode, count(), blocks)
            return
        under_way: deque[Future[EncodedBlock]] = deque()
        for number, block in enumerate(blocks):
            under_way.append(self._pool.submit(self._encode, number, block))
            if len(under_way) > self._threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _encode(self, number: int, block: Block) -> EncodedBlock:
        encoder = self._free.get()
        try:
            return encoder.encode(number, block)
        finally:
            self._free.put(encoder)
