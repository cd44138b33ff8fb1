"""Benchmarks run, and print what they measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.making import as_line
from tests.small_runs import ROOT

pytestmark = pytest.mark.full


def printed(tool: str, *options: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def objects(tool: str, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed(tool, *options) if line.startswith("{")]


def test_the_fan_activation() -> None:
    size = ["--device", "cpu", "--tokens", "16", "--repeats", "2", "--hidden-size", "64"]
    results = objects("bench_kernels", "fan", *size, "--json")
    ways = [(dtype, "eager", way) for dtype in ("fp32", "bf16") for way in ("forward", "backward")]
    assert [(result["dtype"], result["form"], result["direction"]) for result in results] == ways
    # 16 tokens: 48 rows read and 64 columns written; 32 columns of X_F and its 64 gradients read, 48 written.
    moved = [result["bytes_per_second"] * result["seconds"] for result in results[:2]]
    assert moved == pytest.approx([16 * 112 * 4, 16 * 144 * 4])


def test_the_loss_head() -> None:
    size = ["--device", "cpu", "--tokens", "64", "--repeats", "1", "--hidden-size", "16", "--vocab-size", "1024"]
    plain, chunked = objects("bench_kernels", "loss-head", *size, "--dtypes", "fp32", "--json")
    assert (plain["case"], chunked["case"]) == ("plain", "chunked")
    assert plain["time_ratio"] == plain["memory_ratio"] == 1 and chunked["seconds"] > 0


def test_starts() -> None:
    """On two tensor parallel ranks."""
    size = ["--files", "2", "--file-bytes", "200000", "--seq-length", "64", "--ranks", "2", "--tensor-ranks", "2"]
    results = objects("bench_start", *size)
    cases = ("small file", "first start", "later start")
    assert [(result["case"], result["rank"]) for result in results] == [(case, n) for case in cases for n in (0, 1)]
    assert all(result["processor_seconds"] > 0 and result["private_mib"] > 0 for result in results)


def test_prepare_beside_a_plain_loop(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    corpus, work = tmp_path / "a.jsonl", tmp_path / "work"
    corpus.write_bytes(b"".join(as_line(f"document {number}") + b"\n" for number in range(5)))
    options = ["--corpus", str(corpus), "--work", str(work), "--tokenizer", str(olmo_tokenizer_file)]
    *_, ours, loop, last = printed("bench_prepare", *options, "--workers", "1", "--turns", "1")
    assert ours.startswith("prepare, gigatoken") and loop.startswith("encode_files")
    assert last == "the same tokens" and list(work.iterdir()) == []
