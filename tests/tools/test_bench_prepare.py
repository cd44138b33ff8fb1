"""The benchmark of prepare runs, and compares with the plain loop."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.prepare.making import as_line
from tests.small_runs import ROOT


@pytest.mark.full
def test_prepare_beside_a_plain_loop(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    corpus, work = tmp_path / "a.jsonl", tmp_path / "work"
    corpus.write_bytes(b"".join(as_line(f"document {number}") + b"\n" for number in range(5)))
    command = [sys.executable, str(ROOT / "tools" / "bench_prepare.py"), "--corpus", str(corpus), "--work", str(work)]
    options = ["--tokenizer", str(olmo_tokenizer_file), "--workers", "1", "--turns", "1"]
    printed = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout.splitlines()
    *_, ours, loop, last = printed
    assert ours.startswith("prepare, gigatoken") and loop.startswith("encode_files")
    assert last == "the same tokens" and list(work.iterdir()) == []
