"""Token files that the training command refuses, before it starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from tests.small_runs import small_run, write_config, write_tokens

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
