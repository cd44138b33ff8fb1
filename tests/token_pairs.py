"""Token files by megatron-core's own writer, which shares no code with `prepare`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Sequences = Sequence[Any]  # of ids, each


def write_token_pair(prefix: Path, documents: Iterable[Sequences], *, dtype: type = np.uint16) -> str:
    """A .bin and .idx pair of documents of one sequence or more each; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        ids = [token for sequence in sequences for token in sequence]
        builder.add_document(np.array(ids, dtype), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
