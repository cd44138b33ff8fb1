"""Every line of a hostile corpus is a document, exactly, or refused for the reason that it was made for."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.prepare import documents
from tests.prepare import fuzzing
from tests.prepare.making import Prepare

Row = tuple[str, int, str | None, str | None, str]


def written_rows(prefix: str, tokenizer_file: Path) -> Iterator[Row]:
    """File, line, id, source and text of every document, from the ledger and the tokens that it points to."""
    tokenizer = load_tokenizer(tokenizer_file)
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    end = 0
    for batch in parquet.ParquetFile(prefix + ".ledger.parquet").iter_batches(1000):
        for row in batch.to_pylist():
            assert row["first_token"] == end
            end += row["length"]
            assert tokens[end - 1] == tokenizer.eod_id
            text = tokenizer.decode(tokens[row["first_token"] : end - 1].tolist())
            yield row["shard"], row["line"], row["id"], row["source"], text
    assert end == len(tokens)


@pytest.mark.parametrize(("backend", "workers"), [("sentencepiece", 2), ("gigatoken", 1)])
def test_every_line_of_a_fuzzed_corpus_is_accounted_for(
    tmp_path: Path, small_tokenizer_file: Path, prepare: Prepare, backend: str, workers: int
) -> None:
    files = fuzzing.write_fuzzed(tmp_path, 2_500, seed=workers)
    prefix = str(tmp_path / "out" / "tokens")
    manifest = prepare(prefix, *(file.path for file in files), backend=backend, workers=workers).manifest
    assert manifest.refused == Counter(line.reason for file in files for line in file.lines if line.reason is not None)
    expected_rows = [
        (str(file.path), number, line.id, line.source, line.text)
        for file in files
        for number, line in enumerate(file.lines, start=1)
        if line.text is not None
    ]
    for written, expected in zip(written_rows(prefix, small_tokenizer_file), expected_rows, strict=True):
        assert written == expected
    assert manifest.lines_read == sum(len(file.lines) for file in files)
    assert manifest.lines_read == manifest.documents + sum(manifest.refused.values())


def test_the_fuzz_holds_every_reason() -> None:
    lines = fuzzing.fuzzed_lines(random.Random(0), 2_000)
    of_length = {documents.TOO_LONG_A_LINE, documents.TOO_LONG_TO_LOOK_AGAIN}
    reasons = {value for name, value in vars(documents).items() if name.isupper() and isinstance(value, str)}
    assert {line.reason for line in lines} - {None} == reasons - of_length - {documents.PARQUET_SUFFIX}


@pytest.mark.parametrize(
    "start", [b'{"text": null, "other": [', b'{"text": "a", "id": [', b'\xef\xbb\xbf{"text": "a", "x": [']
)
def test_a_line_of_millions_of_objects_is_not_built(start: bytes) -> None:
    line = start + b"{}," * 4_000_000 + b"1]}"
    parser = documents.DocumentParser()
    tracemalloc.start()
    outcome = parser.parse(line)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome == documents.Refusal(documents.TOO_LONG_TO_LOOK_AGAIN)
    assert peak < 2 * len(line)  # built, it takes twenty times its bytes
