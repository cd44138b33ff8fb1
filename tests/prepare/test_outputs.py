"""The token files of a preparation: their index, and when they get their names."""

from pathlib import Path

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare import outputs
from tests.disk_steps import recorded_steps
from tests.prepare.making import Prepare


def test_an_output_on_another_store_is_refused(mixed: Path, prepare: Prepare) -> None:
    with pytest.raises(InputError, match=r"output s3://bucket/web is on another store; name a path, and copy"):
        prepare("s3://bucket/web", mixed)


def test_an_index_of_many_documents_is_written_in_chunks(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "whole", mixed)
    monkeypatch.setattr(outputs, "INDEX_CHUNK", 1)  # three documents make three
    prepare(tmp_path / "chunks", mixed)
    assert (tmp_path / "chunks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


def test_token_files_get_their_names_once_they_are_on_the_disk(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recorded_steps(monkeypatch)
    prepare(tmp_path / "out", mixed)
    names = ("out.bin", "out.idx", "out.ledger.parquet")
    for name in names:
        renamed = steps.index(("rename", name))
        assert ("fsync", name) in steps[:renamed] and ("fsync", tmp_path.name) in steps[renamed:]
    manifest = steps.index(("rename", "out.manifest.json"))
    assert all(steps.index(("rename", name)) < manifest for name in names)
    assert ("fsync", tmp_path.name) == steps[manifest + 1]
