import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data import file_tasks, id_bounds
from megatron_fanformer.data.id_bounds import refuse_ids_outside, scan_of
from megatron_fanformer.errors import InputError

UINT16 = np.dtype("<u2")


@pytest.fixture(autouse=True)
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from end to end; what is found in any file is remembered, however small."""
    read: list[Path] = []
    original = id_bounds._read_bounds
    monkeypatch.setattr(id_bounds, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(id_bounds, "SCAN_TOKENS", 4)

    def noted(file: Path, *others: Any) -> tuple[int, int]:
        read.append(file)
        return original(file, *others)

    monkeypatch.setattr(id_bounds, "_read_bounds", noted)
    return read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.array([1, 2, 3, 4, 5, 70, 7], UINT16).tofile(tmp_path / "a.npy")
    return tmp_path / "a.npy"


def check(file: Path, vocab_size: int, cache: Path | None = None, largest: int | None = None) -> None:
    refuse_ids_outside(vocab_size, "a", file, UINT16, largest=largest, cache=cache)


def test_a_large_file_is_read_once(file: Path, tmp_path: Path, read_files: list[Path]) -> None:
    for _ in range(2):
        check(file, 71, tmp_path / "cache")
        with pytest.raises(InputError, match="a holds token id 70, outside the vocabulary of 70"):
            check(file, 70, tmp_path / "cache")
    assert read_files == [file]


def test_a_file_that_was_written_again_is_read_again(file: Path, tmp_path: Path) -> None:
    check(file, 100, tmp_path / "cache")
    np.array([1, 2, 3, 4, 5, 200, 7], UINT16).tofile(file)
    with pytest.raises(InputError, match="token id 200"):
        check(file, 100, tmp_path / "cache")


def test_what_is_remembered_counts_as_nothing_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no part of the total either, which may be 0."""
    check(file, 100, tmp_path / "cache")
    monkeypatch.setattr(file_tasks, "SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level("INFO")
    task = partial(refuse_ids_outside, 100, "a", file, UINT16, largest=None, cache=tmp_path / "cache")
    scan_of(0).run([task])
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "{", "[]", '{"smallest": 0, "largest": 1}'])
def test_a_torn_note_is_not_believed(file: Path, tmp_path: Path, text: str) -> None:
    check(file, 100, tmp_path / "cache")
    (note,) = (tmp_path / "cache" / "ids").iterdir()
    note.write_text(text)
    with pytest.raises(InputError, match="token id 70"):
        check(file, 70, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_done_without(file: Path) -> None:
    check(file, 100, file / "cache")


def test_a_manifests_word_and_a_type_without_such_ids_spare_the_reading(file: Path, read_files: list[Path]) -> None:
    check(file, 100, largest=70)
    check(file, 65_536)
    assert read_files == []


def test_several_files_are_read_and_the_first_that_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_tasks, "SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level("INFO")
    files = [tmp_path / f"{number}.npy" for number in range(12)]
    for number, file in enumerate(files):
        np.full(6, 100 + number, UINT16).tofile(file)

    def scan(vocab_size: int) -> None:
        options = {"largest": None, "cache": None}
        scan_of(12 * 12).run(
            [partial(refuse_ids_outside, vocab_size, file.name, file, UINT16, **options) for file in files]
        )

    scan(112)
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == 24  # two parts of each
    shares = [int(re.search(r"id: (\d+)% of 0 GB, \d+:\d\d:\d\d left$", line)[1]) for line in message]  # type: ignore[index]
    assert shares == sorted(shares) and shares[-1] == 100
    with pytest.raises(InputError, match=r"^7\.npy holds token id 107"):
        scan(107)
