"""Token files that the training command refuses, before it starts."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.data import survey
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.errors import CorruptError
from tests.small_runs import VOCAB_SIZE, small_run, write_config, write_tokens

SEQUENCES = 60
# Where a byte of each field of the index stands.
FIELDS = {
    "magic": 0,
    "version": 9,
    "dtype code": 17,
    "sequence count": 18,
    "document count": 26,
    "sequence length": 34 + 4 * 7,
    "sequence pointer": 34 + 4 * SEQUENCES + 8 * 7,
    "document bound": 34 + 12 * SEQUENCES + 8 * 7,
}

Refused = Callable[[str, int], str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(data, code)`: the one line that a run on this data ends with; nothing is written."""

    def run(data: str, code: int) -> str:
        config = write_config(tmp_path / "config.yaml", small_run(data, tmp_path / "run"))
        assert main(["train", "--config", str(config)]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "run").exists()
        return line

    return run


@pytest.mark.parametrize("change", [-2, -1, 1, 200])
def test_a_truncated_and_an_extended_bin_file(tmp_path: Path, refused: Refused, change: int) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    data = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(data[:change] if change < 0 else data + bytes(change))
    assert f"{prefix}.bin: it is {'truncated' if change < 0 else 'extended'}" in refused(prefix, 3)


@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_field_of_the_index(tmp_path: Path, refused: Refused, field: str) -> None:
    prefix = write_tokens(tmp_path / "tokens", documents=SEQUENCES)
    data = bytearray(Path(prefix + ".idx").read_bytes())
    data[FIELDS[field]] ^= 1
    Path(prefix + ".idx").write_bytes(data)
    line = refused(prefix, 3)
    assert f"{prefix}.idx" in line and field in line


def test_an_id_beyond_the_vocabulary_in_a_npy_file(tmp_path: Path, refused: Refused) -> None:
    np.full(1000, VOCAB_SIZE, "<u2").tofile(tmp_path / "a.npy")
    assert f"a.npy holds token id {VOCAB_SIZE}, outside the vocabulary" in refused(str(tmp_path / "*.npy"), 2)


def test_files_that_take_long_to_check_are_checked_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An id that no sample has, in the tail of a file: found by the scan alone, which ends the run."""
    monkeypatch.setattr(survey, "DEFERRED_BYTES", 1)
    monkeypatch.setattr(survey, "threading", SimpleNamespace(Thread=AtOnce))
    tokens = np.zeros(1000, "<u2")
    tokens[-1] = VOCAB_SIZE
    for name, content in (("a", tokens), ("b", tokens[:-1])):
        content.tofile(tmp_path / f"{name}.npy")
        values = small_run(str(tmp_path / f"{name}.npy"), tmp_path / name, training={"train_iters": 2})
        config = write_config(tmp_path / "config.yaml", {**values, "schedule": {"lr_warmup_iters": 1}})
        assert main(["train", "--config", str(config)]) == (3 if name == "a" else 0)
        out, errors = capsys.readouterr()
        assert "for their largest id while the run goes on" in out
        assert (f"a.npy holds token id {VOCAB_SIZE}, outside the vocabulary" in errors) == (name == "a")
        assert ("all ids of the token files are within the vocabulary" in out) == (name == "b")


class AtOnce:
    """A thread that has ended when it starts."""

    def __init__(self, target: Callable[..., None], args: list[Any], daemon: bool) -> None:
        self.start = functools.partial(target, *args)


def test_a_scan_that_is_stopped_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the part that it reads, of the first of its files."""
    monkeypatch.setattr(survey, "DEFERRED_BYTES", 1)
    files = [str(tmp_path / f"{name}.npy") for name in "abc"]
    for file in files:
        np.zeros(1000, "<u2").tofile(file)
    found = survey.survey_data(DataConfig(train_data=files), VOCAB_SIZE, for_run=True)
    assert found.has_unread_ids
    monkeypatch.setattr(survey, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None)))
    scan = survey.DeferredScan(found, VOCAB_SIZE)
    scan.start()
    scan.stop()
    assert scan._scan is not None
    with pytest.raises(InterruptedError):
        scan._scan.run([check.run for check in survey._id_checks(found, VOCAB_SIZE)])
    scan.raise_failure()


def test_a_file_that_goes_away_meanwhile_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "DEFERRED_BYTES", 1)
    np.zeros(1000, "<u2").tofile(tmp_path / "a.npy")
    scan = survey.DeferredScan(
        survey.survey_data(DataConfig(train_data=[str(tmp_path / "a.npy")]), VOCAB_SIZE, for_run=True), VOCAB_SIZE
    )

    def start_late(**options: Any) -> AtOnce:
        (tmp_path / "a.npy").unlink()
        return AtOnce(**options)

    monkeypatch.setattr(survey, "threading", SimpleNamespace(Thread=start_late))
    scan.start()
    with pytest.raises(CorruptError, match=r"a\.npy cannot be read \(No such file or directory\); put it back"):
        scan.raise_failure()


def test_half_a_token_in_a_npy_file(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "a.npy").write_bytes(bytes(1001))
    assert "holds 1001 bytes, not a multiple of 2" in refused(str(tmp_path / "a.npy"), 3)
