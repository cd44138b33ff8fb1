"""From blocks of documents, conversations or tokens to token buffers; the threads that share one file's blocks.

Worker processes are spawned and import this module, so nothing here may import torch or megatron-core: that
would cost each of them seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron_fanformer.data.chat_template import ASSISTANT, ChatTemplate, RenderedChat, TemplateRefusal, chat_pieces
from megatron_fanformer.data.manifest import Settings
from megatron_fanformer.data.token_files import NUMPY_MAGIC
from megatron_fanformer.durable_files import naming
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare.document_files import Block, parse_block
from megatron_fanformer.prepare.documents import Chat, ChatParser, DocumentParser, Refusal, is_learned
from megatron_fanformer.prepare.id_encoders import EncoderChoice

# In one of every so many blocks, the first document, or so much of it, is also encoded by the exact tokenizer.
CHECKED_BLOCKS = 8
CHECKED_CHARACTERS = 4_000
BLOCK_TOKENS = 1 << 22
# A file without any end of text was made by another tokenizer, and must not be held in memory as one document.
MAX_DOCUMENT_TOKENS = 1 << 26
# Why a conversation is left out.
TOO_MANY_TOKENS = "longer than max_tokens"
NOTHING_LEARNED = "nothing to learn"
MARKS_OTHERS = "the template does not mark each answer, and some have weights"
NOTHING_LEARNED_BEFORE_CUT = "nothing to learn within max_tokens"


class TokenizersDisagree(Exception):
    """The fast tokenizer gave other ids than the exact one; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The tokens of a block's conversations that are learned."""

    mask: np.ndarray
    """[tokens] uint8: 1 where the token is learned."""
    counts: np.ndarray
    """[documents] int32: learned tokens of each document."""
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
    """Refused lines: the line in the block, from 0, and the reason."""
    learned: Learned | None = None
    """Learned tokens, where the documents are conversations."""


def _encoded(outcomes: Sequence[Any], **tokens: Any) -> EncodedBlock:
    """Return the result of a block: the outcome of each of its lines, and the facts about its tokens."""
    kept = [(number, one) for number, one in enumerate(outcomes) if not isinstance(one, Refusal)]
    return EncodedBlock(
        lines=len(outcomes),
        numbers=[number for number, _ in kept],
        ids=[one.id for _, one in kept],
        sources=[one.source for _, one in kept],
        refusals=[(number, one.reason) for number, one in enumerate(outcomes) if isinstance(one, Refusal)],
        **tokens,
    )


class CheckedEncoder:
    """Encodes the texts of blocks, and compares some of the ids with the exact tokenizer's."""

    def __init__(self, choice: EncoderChoice) -> None:
        self._encoder = choice.make()
        self._exact = choice.exact() if choice.trust is not None else None

    def encode(self, number: int, texts: Sequence[bytes], name: str) -> list[np.ndarray]:
        """Return the ids of each text of the file's `number`-th block.

        Raises TokenizersDisagree if the exact tokenizer gives other ids to the first text, which it calls `name`.
        """
        if self._exact is not None and texts and number % CHECKED_BLOCKS == 0:
            beginning = texts[0].decode()[:CHECKED_CHARACTERS]
            if self._encoder.encode_batch([beginning.encode()])[0].tolist() != self._exact.encode(beginning):
                raise TokenizersDisagree(name)
        return self._encoder.encode_batch(texts)


class BlockEncoder:
    """Parses and tokenizes blocks of documents, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        self._parser = DocumentParser(
            settings.text_field,
            min_length=settings.min_length,
            max_length=settings.max_length,
            sources=settings.sources,
        )
        self._encoder = CheckedEncoder(choice)
        self._eod_id = choice.eod_id
        self._dtype = np.dtype(settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the documents of `block`, the file's `number`-th, in order. May raise TokenizersDisagree."""
        outcomes = parse_block(block, self._parser)
        documents = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
        texts = [document.text.encode() for document in documents]
        rows = self._encoder.encode(number, texts, f"document {documents[0].id!r}" if documents else "")
        lengths = np.array([len(row) + 1 for row in rows], np.int32)
        tokens = np.full(lengths.sum(dtype=np.int64), self._eod_id, self._dtype)
        for row, end in zip(rows, np.cumsum(lengths, dtype=np.int64).tolist(), strict=True):
            tokens[end - 1 - len(row) : end - 1] = row
        return _encoded(outcomes, tokens=tokens, lengths=lengths, text_bytes=sum(map(len, texts)))


class ChatEncoder:
    """Parses, renders and tokenizes blocks of conversations, on one thread at a time."""

    def __init__(self, choice: EncoderChoice, settings: Settings) -> None:
        assert settings.chat is not None
        self._parser = ChatParser()
        self._template = ChatTemplate(settings.chat.template, settings.chat.template_variables)
        self._tokenizer = choice.exact()
        self._encoder = CheckedEncoder(choice)
        self._settings = settings.chat
        self._dtype = np.dtype(settings.dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """Encode the conversations of `block`, the file's `number`-th, in order. May raise TokenizersDisagree."""
        outcomes = parse_block(block, self._parser)
        rendered: dict[int, RenderedChat] = {}  # by line
        for line, chat in enumerate(outcomes):
            if not isinstance(chat, Refusal):
                try:
                    rendered[line] = self._rendered(chat)
                except TemplateRefusal as refusal:
                    outcomes[line] = Refusal(refusal.reason)
        name = f"conversation {outcomes[next(iter(rendered))].id!r}" if rendered else ""
        chats = {line: list(chat_pieces(self._tokenizer, text)) for line, text in rendered.items()}
        texts = [piece.encode() for pieces in chats.values() for piece, _ in pieces if isinstance(piece, str)]
        encoded = iter(self._encoder.encode(number, texts, name))
        ids, masks, is_cut, text_bytes = [np.empty(0, self._dtype)], [np.empty(0, np.uint8)], [], 0
        for line, pieces in chats.items():
            parts = [next(encoded) if isinstance(piece, str) else np.array([piece]) for piece, _ in pieces]
            flags = [np.full(len(part), flag, np.uint8) for part, (_, flag) in zip(parts, pieces, strict=True)]
            fitted = self._fitted(np.concatenate([ids[0], *parts]), np.concatenate([masks[0], *flags]))
            if isinstance(fitted, Refusal):
                outcomes[line] = fitted
                continue
            ids.append(fitted[0].astype(self._dtype))
            masks.append(fitted[1])
            is_cut.append(fitted[2])
            text_bytes += len(rendered[line].text.encode())
        return _encoded(
            outcomes,
            tokens=np.concatenate(ids),
            lengths=np.array(list(map(len, ids[1:])), np.int32),
            text_bytes=text_bytes,
            learned=Learned(
                mask=np.concatenate(masks),
                counts=np.array([mask.sum() for mask in masks[1:]], np.int32),
                is_cut=np.array(is_cut, bool),
            ),
        )

    def _rendered(self, chat: Chat) -> RenderedChat:
        rendered = self._template.render(chat.messages, tools=chat.tools)
        weights = [is_learned(message) for message in chat.messages if message["role"] == ASSISTANT]
        if all(weights):
            weights = [True] * len(rendered.learned)
        elif len(weights) != len(rendered.learned):
            raise TemplateRefusal("answers have weights, and the template does not mark each of them", MARKS_OTHERS)
        spans = list(zip(rendered.learned, weights, strict=True))
        kept = spans if self._settings.learn == "all" else spans[-1:]
        return rendered._replace(learned=[span for span, weight in kept if weight])

    def _fitted(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | Refusal:
        """Return a conversation at its length (ids, mask, whether it was cut), or why it is refused."""
        settings = self._settings
        is_cut = settings.max_tokens is not None and len(ids) > settings.max_tokens
        if is_cut and settings.too_long == "drop":
            return Refusal(TOO_MANY_TOKENS)
        ids, mask = ids[: settings.max_tokens], mask[: settings.max_tokens]
        if not mask.any():
            return Refusal(NOTHING_LEARNED_BEFORE_CUT if is_cut else NOTHING_LEARNED)
        if settings.pad_id is not None and settings.max_tokens is not None:
            padding = settings.max_tokens - len(ids)
            ids = np.pad(ids, (0, padding), constant_values=settings.pad_id)
            mask = np.pad(mask, (0, padding))
        return ids, mask, is_cut


class EncodingThreads:
    """Encodes a file's blocks on one thread or several, each with its own encoder; order is kept."""

    def __init__(self, make: Callable[[], BlockEncoder | ChatEncoder], threads: int) -> None:
        self._threads = threads
        self._free: SimpleQueue[BlockEncoder | ChatEncoder] = SimpleQueue()
        for _ in range(threads):
            self._free.put(make())
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def encode(self, blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
        """Yield the encoded blocks, in order; a few are in progress at a time."""
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


# -- token files


def npy_blocks(path: Path, *, dtype: str, eod_id: int, vocab_size: int, output_dtype: str) -> Iterator[EncodedBlock]:
    """Yield a token file's documents in blocks of whole ones, cut after each end-of-text id; a document is a line.

    What follows the last end of text is a document too. Raises CorruptError for a size that is not a multiple of the
    token size, InputError for a file with a NumPy header or with an id outside the vocabulary.
    """
    tokens = _mapped(path, np.dtype(dtype).newbyteorder("<"))
    start = 0
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[at : at + BLOCK_TOKENS]
        if (largest := int(block.max())) >= vocab_size:
            raise InputError(
                f"{path} holds token id {largest}, outside the tokenizer's vocabulary of {vocab_size};"
                " name the tokenizer that made the tokens"
            )
        ends = at + 1 + np.flatnonzero(block == eod_id)
        if len(ends) == 0 and at - start > MAX_DOCUMENT_TOKENS:
            raise InputError(
                f"{path} has no end-of-text id {eod_id} in more than {MAX_DOCUMENT_TOKENS} tokens;"
                " state the id that ends its documents by --eod-id"
            )
        if len(ends):
            yield _block(tokens[start : ends[-1]], np.diff(ends, prepend=start), output_dtype)
            start = int(ends[-1])
    if start < len(tokens):
        yield _block(tokens[start:], np.array([len(tokens) - start]), output_dtype)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a whole number of {dtype.name} tokens;"
            " copy it again, or set npy_dtype to its type"
        )
    with naming(path), path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise InputError(f"{path} has a NumPy header; name headerless token files, as tofile writes them")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def _block(tokens: np.ndarray, lengths: np.ndarray, dtype: str) -> EncodedBlock:
    documents = len(lengths)
    return EncodedBlock(
        lines=documents,
        tokens=tokens.astype(dtype),
        lengths=lengths.astype(np.int32),
        numbers=list(range(documents)),
        ids=[None] * documents,
        sources=[None] * documents,
        text_bytes=0,
        refusals=[],
    )
