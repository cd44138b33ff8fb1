"""Token files with everything that stands beside them, made without `prepare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_fanformer.data.manifest import (
    Encoding,
    FileRecord,
    InputRecord,
    Manifest,
    Settings,
    TokenFiles,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
)
from megatron_fanformer.durable_files import sha256_of
from tests.token_pairs import write_token_pair

LEDGER_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("line", pa.int64()),
        ("first_token", pa.int64()),
        ("length", pa.int32()),
    ]
)
ROWS_A_GROUP = 7  # so that a few documents make several groups
LINES_A_SHARD = 20

Documents = Sequence[Sequence[int]]


def random_documents(vocab_size: int, *, count: int = 60, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(vocab_size, size=20 + number).tolist() for number in range(count)]


def write_pair(prefix: Path, documents: Documents) -> str:
    """A .bin and .idx pair; returns the prefix."""
    return write_token_pair(prefix, [[document] for document in documents])


def write_npy(prefix: Path, documents: Documents) -> str:
    """A headerless .npy file; returns its path."""
    np.concatenate([np.array(document, "<u2") for document in documents]).tofile(f"{prefix}.npy")
    return f"{prefix}.npy"


def ledger_table(documents: Documents, name: str = "docs") -> pa.Table:
    """Document n is line n % 20 + 1 of shard n // 20; every third has neither id nor source."""
    lengths = [len(document) for document in documents]
    rows = [
        {
            "id": None if number % 3 == 2 else f"{name}-{number}",
            "source": None if number % 3 == 2 else "test",
            "shard": f"{name}.{number // LINES_A_SHARD}.jsonl.gz",
            "line": number % LINES_A_SHARD + 1,
            "first_token": sum(lengths[:number]),
            "length": length,
        }
        for number, length in enumerate(lengths)
    ]
    return pa.Table.from_pylist(rows, LEDGER_SCHEMA)


def write_ledger(prefix: Path | str, documents: Documents, **options: Any) -> Path:
    path = Path(f"{prefix}.ledger.parquet")
    pq.write_table(ledger_table(documents, Path(prefix).name), path, row_group_size=ROWS_A_GROUP, **options)
    return path


def write_manifest(prefix: Path | str, documents: Documents, tokenizer: Path, **settings: Any) -> Manifest:
    """The manifest of what stands under a prefix."""
    output = token_files(prefix, documents)
    manifest = Manifest(
        lines_read=output.documents + 2,
        documents=output.documents,
        tokens=output.tokens,
        text_bytes=12_345,
        max_token_id=output.max_token_id,
        refused={"not JSON": 2},
        refused_examples=[],
        settings=Settings(text_field="text", dtype="uint16", **settings),
        tokenizer=TokenizerRecord(path=str(tokenizer), sha256=sha256_of(tokenizer), vocab_size=50_280, eod_id=50_279),
        encoding=Encoding(backend="gigatoken"),
        inputs=[InputRecord(path=f"docs.{n}.jsonl.gz", bytes=1000, sha256="1" * 64, modified_ns=1) for n in range(3)],
        outputs=[output],
        versions={"megatron-fanformer": "0.1.0"},
    )
    manifest_path(str(prefix)).write_bytes(encode_manifest(manifest))
    return manifest


def token_files(prefix: Path | str, documents: Documents) -> TokenFiles:
    endings = (".bin", ".idx", ".npy", ".ledger.parquet")
    paths = {ending: path for ending in endings if (path := Path(f"{prefix}{ending}")).exists()}
    return TokenFiles(
        prefix=Path(prefix).name,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        max_token_id=max(map(max, documents)),
        files={
            ending: FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
            for ending, path in paths.items()
        },
    )
