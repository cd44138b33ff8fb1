"""The folder of an unfinished preparation: it goes, whatever the disk."""

import os
from pathlib import Path

import pytest

from megatron_fanformer.prepare.encoded_inputs import work_folder
from megatron_fanformer.prepare.outputs import writing_to
from tests.disk_steps import network_disk


def test_a_work_folder_goes_on_a_network_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an open file that is removed, as its lock is, stays in it until it is closed."""
    network_disk(monkeypatch)
    prefix = str(tmp_path / "new" / "out")
    with writing_to(prefix), work_folder(prefix) as work:
        (work.path / "00000000.json").touch()
        work.clear()
        assert [path.name for path in work.path.iterdir()] == ["lock"]  # still held
    with work_folder(prefix):
        pass
    assert list((tmp_path / "new").iterdir()) == []


def test_a_work_folder_where_another_process_has_begun_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so as soon as the lock has no name, before the folder is gone."""
    close = os.close

    def begun(descriptor: int) -> None:
        (work.path / "assignment.json").touch()
        close(descriptor)

    with work_folder(str(tmp_path / "out")) as work:
        monkeypatch.setattr(os, "close", begun)
    assert [path.name for path in work.path.iterdir()] == ["assignment.json"]
