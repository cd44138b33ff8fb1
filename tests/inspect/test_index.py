"""`inspect --index` makes beforehand what the start of a run looks up of its data."""

from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from tests.small_runs import small_run, write_config, write_tokens


def test_what_a_start_looks_up_is_made_beforehand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The start makes no index anew."""
    tokens = write_tokens(tmp_path / "tokens")
    values = small_run(
        tokens, tmp_path / "run", data={"stages": {"from step 5": [tokens]}, "cache_path": str(tmp_path)}
    )
    file = write_config(tmp_path / "run.yaml", values)
    assert main(["inspect", str(file), "--index"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: ready for {file}\n"
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(list(tmp_path.glob("*/complete.json"))) == 1
    assert main(["inspect", str(file), "--index"]) == 0
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


def test_a_folder_of_tokens_is_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "tokens", "--index"]) == 2
    assert "tokens is no configuration file (.yaml)" in capsys.readouterr().err
