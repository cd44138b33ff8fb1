"""The work of one preparation worker: a block of lines in, token bytes out.

Worker processes start afresh and import this module, so nothing here may import torch or megatron-core: that
would cost each of them seconds.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np

from megatron_fanformer.data.documents import DocumentParser, Refusal, split_lines
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer

EXAMPLES_PER_BLOCK = 5


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """What became of one block of lines: lines == documents + the sum of refused."""

    lines: int
    documents: int
    tokens: bytes
    """The documents' tokens one after the other, each document ended by the end-of-text id."""
    lengths: bytes
    """int32, one a document: its tokens, the end-of-text id counted."""
    token_count: int
    max_token_id: int
    """-1 where there are no documents."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    refused: dict[str, int]
    """Lines refused, by reason."""
    examples: list[tuple[int, str]]
    """The first refused lines: number in the block, from 0, and reason."""


class Encoder:
    """Parses and tokenizes blocks of lines."""

    def __init__(self, tokenizer: Tokenizer, text_field: str, dtype: str) -> None:
        self._tokenizer = tokenizer
        self._parser = DocumentParser(text_field)
        self._dtype = np.dtype(dtype)

    def encode(self, block: bytes) -> EncodedBlock:
        """Encode the documents among the lines of `block`, in order."""
        texts: list[str] = []
        refusals: list[tuple[int, str]] = []
        lines = split_lines(block)
        for number, line in enumerate(lines):
            text = self._parser.parse(line)
            if isinstance(text, Refusal):
                refusals.append((number, text.reason))
            else:
                texts.append(text)
        arrays = [self._with_end(ids) for ids in self._tokenizer.encode_batch(texts)]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self._dtype)
        return EncodedBlock(
            lines=len(lines),
            documents=len(texts),
            tokens=tokens.tobytes(),
            lengths=np.array([len(array) for array in arrays], np.int32).tobytes(),
            token_count=len(tokens),
            max_token_id=int(tokens.max(initial=0)) if arrays else -1,
            text_bytes=sum(len(text.encode()) for text in texts),
            refused=dict(Counter(reason for _, reason in refusals)),
            examples=refusals[:EXAMPLES_PER_BLOCK],
        )

    def _with_end(self, ids: list[int]) -> np.ndarray:
        ids.append(self._tokenizer.eod_id)
        return np.array(ids, self._dtype)


_encoder: Encoder | None = None  # one a worker process, made when it starts


def start_worker(tokenizer_path: str, eod_id: int, text_field: str, dtype: str) -> None:
    """Make this process a worker: Ctrl-C is its parent's business, and it does not outlive its parent."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = Encoder(load_tokenizer(tokenizer_path, eod_id=eod_id), text_field, dtype)


def encode_block(block: bytes) -> EncodedBlock:
    """`Encoder.encode`, in a process that `start_worker` has made a worker."""
    assert _encoder is not None
    return _encoder.encode(block)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
