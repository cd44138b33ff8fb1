"""Documents found by their tokens, without reading more of the ledger than holds them."""

from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_fanformer.data.ledger import COLUMNS, Ledger, LedgerRow, LedgerWriter, schema
from megatron_fanformer.errors import CorruptError
from tests.inspect.making import ROWS_A_GROUP, ledger_table, random_documents, write_ledger

DOCUMENTS = random_documents(100)
TOKENS = sum(map(len, DOCUMENTS))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(write_ledger(tmp_path / "docs", DOCUMENTS))


def test_every_range_of_tokens_has_its_documents(ledger: Ledger) -> None:
    rows = ledger_table(DOCUMENTS).to_pylist()
    assert len(ledger._groups) == -(-len(rows) // ROWS_A_GROUP)
    for length in (1, 2, 50, 700):
        for first in range(0, TOKENS - length, 13):
            found = ledger.documents(first, length)
            touched = [
                row
                for row in rows
                if row["first_token"] < first + length and first < row["first_token"] + row["length"]
            ]
            assert found == [LedgerRow(**row) for row in touched]


def test_only_the_row_groups_of_the_tokens_are_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_file", mock.Mock(wraps=ledger._file))
    start = ledger_table(DOCUMENTS)["first_token"][3 * ROWS_A_GROUP].as_py()
    ledger.documents(start, 5)
    ledger.documents(start - 1, 5)
    ledger.documents(start, 9)
    assert [call.args[0] for call in ledger._file.read_row_group.call_args_list] == [3, 2]


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptError, match="cannot be read as a ledger"):
        Ledger(path)
    pq.write_table(ledger_table(DOCUMENTS).drop_columns(["line"]), path)
    with pytest.raises(CorruptError, match="has no column line"):
        Ledger(path)
    write_ledger(tmp_path / "x", DOCUMENTS, write_statistics=False)
    with pytest.raises(CorruptError, match="cannot be read as a ledger"):
        Ledger(path)


def test_a_ledger_without_documents(tmp_path: Path) -> None:
    ledger = Ledger(write_ledger(tmp_path / "none", []))
    assert (ledger.rows, list(COLUMNS)) == (0, list(ledger_table([]).schema.names))
    with pytest.raises(CorruptError, match="covers 0 of the 1 tokens"):
        ledger.documents(0, 1)


def test_a_refused_conversation_has_a_row_and_no_tokens(tmp_path: Path) -> None:
    """It stands between two tokens, and is in no range of them."""
    path = tmp_path / "chats.ledger.parquet"
    columns = {"id": ["a", None, "b"], "source": [None] * 3, "line": [1, 2, 3], "length": [4, 0, 3]}
    columns |= {"learned": [2, 0, 1], "outcome": ["whole", "unknown role", "cut"]}
    with path.open("wb") as file:
        writer = LedgerWriter(file, is_chats=True)
        kinds = [(name, schema(is_chats=True).field(name).type) for name in columns]
        writer.add(pa.RecordBatch.from_pydict(columns, pa.schema(kinds)), "chats.jsonl", first_token=0)
        writer.finish()
    first, second = Ledger(path).documents(0, 7)
    assert first == LedgerRow("a", None, "chats.jsonl", 1, 0, 4, 2, "whole")
    assert second == LedgerRow("b", None, "chats.jsonl", 3, 4, 3, 1, "cut")
