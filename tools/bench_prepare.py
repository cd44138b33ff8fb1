"""Measure `prepare` end to end beside a plain loop of gigatoken's `encode_files`, in turns.

    python tools/bench_prepare.py --corpus FILE… --work FOLDER --tokenizer tokenizer.json

The loop encodes all documents of a file at once, appends an end of text to each and writes uint16. It has no ledger,
manifest, resume, check of ids or bound of memory. The tokens differ if gigatoken encodes a document otherwise than the
exact library, which `prepare` then uses. CPU seconds are user and system seconds of all processes, which other programs
disturb less than wall seconds; the table shows the smallest of the turns. An MB is 10^6 bytes of uncompressed JSON.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from isal import igzip

MB = 1e6
PLAIN_LOOP = """
import sys
from pathlib import Path
import gigatoken
import numpy as np

output, tokenizer, eod_id, workers, *files = sys.argv[1:]
load = gigatoken.Tokenizer.from_json if tokenizer.endswith(".json") else gigatoken.Tokenizer.from_sentencepiece
encoder = load(Path(tokenizer).read_bytes())
with open(output, "wb") as out:
    for file in files:
        rows = encoder.encode_files(gigatoken.JsonlFileSource([file]), parallel=int(workers) > 1).layout
        offsets = np.asarray(rows.offsets.data)
        ids = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        np.insert(ids, offsets[1:] - offsets[0], int(eod_id)).astype(np.uint16).tofile(out)
"""


class Turn(NamedTuple):
    """A timed run of `prepare` or of the loop."""

    cpu_seconds: float
    wall_seconds: float
    sha256: str
    """Of the tokens."""


def main() -> int:
    """Run `prepare` and the loop in turns, and print a table of their times."""
    from megatron_fanformer.data.tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", required=True, help="JSON lines, or .gz")
    parser.add_argument("--work", type=Path, required=True, help="folder for the outputs")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--backends", nargs="+", default=["gigatoken"], help="of prepare (gigatoken)")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="(1 2)")
    parser.add_argument("--turns", type=int, default=3, help="of each (3)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    files = sorted(options.corpus)
    tokenizer = load_tokenizer(options.tokenizer)
    turns: dict[tuple[str, int], list[Turn]] = {}
    for _ in range(options.turns):
        for workers in options.workers:
            for backend in options.backends:
                turn = run_prepare(files, options.tokenizer, backend, workers, options.work)
                turns.setdefault((f"prepare, {backend}", workers), []).append(turn)
            turn = run_loop(files, str(tokenizer.path), tokenizer.eod_id, workers, options.work)
            turns.setdefault(("encode_files", workers), []).append(turn)
    size = sum(map(json_bytes, files)) / MB
    print(f"{size:.0f} MB of JSON\n{'':24}{'workers':>8}{'CPU s':>8}{'MB/CPU s':>10}{'wall s':>8}")
    for (name, workers), several in turns.items():
        cpu, wall = min(turn.cpu_seconds for turn in several), min(turn.wall_seconds for turn in several)
        print(f"{name:24}{workers:8}{cpu:8.2f}{size / cpu:10.1f}{wall:8.2f}")
    sums = {turn.sha256 for several in turns.values() for turn in several}
    print("the same tokens" if len(sums) == 1 else "the tokens differ")
    return 0


def json_bytes(file: Path) -> int:
    """Return the bytes of a file, uncompressed."""
    if file.suffix != ".gz":
        return file.stat().st_size
    with igzip.open(file) as stream:
        return sum(len(block) for block in iter(lambda: stream.read(1 << 20), b""))


def run_prepare(files: Sequence[Path], tokenizer: str, backend: str, workers: int, folder: Path) -> Turn:
    """Run `prepare` as a user does."""
    prefix = folder / f"{backend}-{workers}"
    command = [sys.executable, "-m", "megatron_fanformer", "prepare", *map(str, files), "--output", str(prefix)]
    command += ["--tokenizer", tokenizer, "--backend", backend, "--workers", str(workers)]
    seconds = _timed(command)
    manifest = json.loads(Path(f"{prefix}.manifest.json").read_text())
    for path in folder.glob(f"{prefix.name}.*"):
        path.unlink()
    return Turn(*seconds, manifest["outputs"][0]["files"][".bin"]["sha256"])


def run_loop(files: Sequence[Path], tokenizer: str, eod_id: int, workers: int, folder: Path) -> Turn:
    """Run the plain loop; two workers are two threads."""
    output = folder / "loop.npy"
    command = [sys.executable, "-c", PLAIN_LOOP, str(output), tokenizer, str(eod_id), str(workers), *map(str, files)]
    seconds = _timed(command, RAYON_NUM_THREADS=str(workers))
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    output.unlink()
    return Turn(*seconds, digest)


def _timed(command: list[str], **variables: str) -> tuple[float, float]:
    """Run a command; return the CPU seconds of all its processes, and the wall seconds."""
    before, began = _children_seconds(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **variables})
    return _children_seconds() - before, time.monotonic() - began


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
