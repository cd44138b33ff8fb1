"""Ways to cut files of tokens into the pieces that are scored by themselves.

A piece is [file, first token, number of tokens, how many of its last ones are scored]. One of which all are scored is
led by an end of text, of which its first token is predicted.
"""

import numpy as np

COLUMNS = 4


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
