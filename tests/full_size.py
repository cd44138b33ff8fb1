"""How much of the longest proofs is run: `make test-full` takes a share, and `FULL_SIZE=1 make test-full` hours."""

import os


def full_size(whole: int, share: int) -> int:
    """A number of cases: all that a proof is quoted with, or the share."""
    return whole if os.environ.get("FULL_SIZE") else share
