"""The benchmark of `prepare` beside a plain loop, on a few lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preparation.making import as_line


@pytest.mark.full
def test_both_are_measured_and_write_the_same_tokens(
    run_tool: Callable[..., int], tmp_path: Path, olmo_tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(b"".join(as_line(f"document {number}") + b"\n" for number in range(5)))
    options = ["--corpus", str(corpus), "--work", str(tmp_path / "work"), "--tokenizer", str(olmo_tokenizer_file)]
    assert run_tool("bench_prepare_peer", *options, "--workers", "1", "--turns", "1") == 0
    *rows, ratio, _, _, last = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows[-2:]] == [["prepare", "1"], ["encode_files", "1"]]
    assert ratio.startswith("1 workers: prepare makes ") and last == "the same tokens"
    assert list((tmp_path / "work").iterdir()) == []
