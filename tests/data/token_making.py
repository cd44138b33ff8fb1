"""Writes token files for the tests of what reads them, without `prepare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import Datasets, build_datasets
from megatron_fanformer.data.manifest import (
    ChatSettings,
    Encoding,
    FileRecord,
    Manifest,
    Settings,
    TokenFiles,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
)
from tests.token_pairs import write_token_pair

VOCAB_SIZE = 600


def random_ids(count: int, *, seed: int = 0) -> np.ndarray:
    """[count] ids below VOCAB_SIZE, 0 left out."""
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, size=count)


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], *, dtype: type = np.uint16, seed: int = 0) -> str:
    """A pair of documents by the lengths of their sequences; returns the prefix."""
    drawn = [
        np.split(random_ids(sum(lengths), seed=seed + number), np.cumsum(lengths)[:-1]) if lengths else []
        for number, lengths in enumerate(documents)
    ]
    return write_token_pair(prefix, drawn, dtype=dtype)


def write_npy(path: Path, tokens: int, *, seed: int = 0, dtype: str = "<u2") -> str:
    """A headerless file of random ids; returns its path."""
    random_ids(tokens, seed=seed).astype(dtype).tofile(path)
    return str(path)


def build(
    config: DataConfig, train_samples: int = 50, valid_samples: int | None = 8, *, seq_length: int = 64, seed: int = 1
) -> Datasets:
    """The datasets of a configuration, whose files have not been checked."""
    sizes: dict[str, Any] = {"train_samples": train_samples, "valid_samples": valid_samples}
    return build_datasets(config, seq_length=seq_length, seed=seed, vocab_size=VOCAB_SIZE, eod_id=1, **sizes)


def drawn(dataset: Any, samples: int) -> torch.Tensor:
    """[samples, seq_length], their tokens."""
    return torch.stack([dataset[sample]["tokens"] for sample in range(samples)])


def raw_tokens(prefix: str, first: int, length: int, *, dtype: str = "<u2") -> list[int]:
    """Tokens straight out of the .bin or .npy file of a prefix, with no code of the package."""
    path = next(path for path in (Path(prefix + ".bin"), Path(prefix + ".npy")) if path.exists())
    return np.fromfile(path, dtype=dtype)[first : first + length].tolist()


def write_manifest(prefix: str, *, dtype: str, max_token_id: int, chat: ChatSettings | None = None) -> None:
    """The manifest of one prefix, of its files as they are."""
    files = [path for path in map(Path, (prefix + ".bin", prefix + ".idx", prefix + ".npy")) if path.exists()]
    records = {path.suffix: FileRecord(path=path.name, bytes=path.stat().st_size, sha256="") for path in files}
    output = TokenFiles(prefix=Path(prefix).name, documents=1, tokens=1, max_token_id=max_token_id, files=records)
    manifest = Manifest(
        lines_read=1,
        documents=1,
        tokens=1,
        text_bytes=1,
        max_token_id=max_token_id,
        refused={},
        refused_examples=[],
        settings=Settings(text_field="text", dtype=dtype, format="npy" if ".npy" in records else "megatron", chat=chat),
        tokenizer=TokenizerRecord(path="tokenizer.json", sha256="", vocab_size=VOCAB_SIZE, eod_id=0),
        encoding=Encoding(backend="none"),
        inputs=[],
        outputs=[output],
        versions={},
    )
    manifest_path(prefix).write_bytes(encode_manifest(manifest))
