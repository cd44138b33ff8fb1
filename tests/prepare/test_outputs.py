"""The token files of a preparation: their index, and when they get their names."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.prepare import outputs
from tests.disk_steps import recorded_steps
from tests.prepare.making import Prepare, hashes


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


def test_a_stop_before_any_name_is_given_is_made_good(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "whole" / "out", mixed)
    rename, step = os.replace, 0
    while step < 20:
        step, calls = step + 1, count(1)

        def stopped(*paths: Any, calls: Iterator[int] = calls, step: int = step) -> None:
            if next(calls) == step:
                raise KeyboardInterrupt
            rename(*paths)

        output = tmp_path / str(step) / "out"
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", stopped)
            prepare(output, mixed)
            break
        prepare(output, mixed)
        assert hashes(output.parent) == hashes(tmp_path / "whole")
    assert 4 < step < 20
