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


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["tokens", "--index"], "tokens is no configuration file (.yaml)"),
        (["run.yaml", "--index", "--step", "3"], "--step has no effect with --index"),
    ],
)
def test_other_uses_of_index_are_refused(arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *arguments]) == 2
    assert output in capsys.readouterr().err
