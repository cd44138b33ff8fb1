"""Files of chats as `prepare --chat` writes them, without `prepare`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.token_pairs import write_token_pair

Chat = tuple[Sequence[int], Sequence[bool]]
"""Ids, and which of them are learned."""


def write_chats(prefix: Path, chats: Sequence[Chat]) -> str:
    """PREFIX.bin, .idx and .mask.bin; returns the prefix."""
    masks = [np.array(learned, np.uint8) for _, learned in chats]
    Path(f"{prefix}.mask.bin").write_bytes(np.concatenate(masks).tobytes())
    return write_token_pair(prefix, [[ids] for ids, _ in chats])


def random_chats(count: int, *, vocab_size: int, shortest: int = 2, longest: int = 12, seed: int = 0) -> list[Chat]:
    """Random ids in conversations of random lengths; a tail of random length of each is learned."""
    draw = np.random.default_rng(seed)
    chats: list[Chat] = []
    for length in draw.integers(shortest, longest + 1, size=count).tolist():
        first_learned = int(draw.integers(1, length))
        chats.append(
            (draw.integers(vocab_size, size=length).tolist(), [place >= first_learned for place in range(length)])
        )
    return chats
