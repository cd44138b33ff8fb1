"""How `prepare` compares with a plain loop of gigatoken's `encode_files`: in turns, on the same JSON lines.

    python tools/bench_prepare_peer.py --corpus FILE… --work FOLDER --tokenizer tokenizer.json

The loop is what a program needs that wants token ids and nothing else: a file's documents encoded at once by gigatoken,
an end of text after each, written as uint16. It has no ledger, manifest, resume, check of ids, or bound of memory, and
with two workers two threads. `prepare` has all of it on. Where gigatoken alone encodes a document otherwise than the
exact library, the tokens differ. CPU seconds are user and system seconds of all processes, which other programs disturb
less than the wall's; of each the least of the turns is shown.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_prepare import MB, children_seconds, json_bytes, measure_command

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


@dataclass
class Turn:
    """One run of one of the two."""

    name: str
    workers: int
    cpu_seconds: float
    wall_seconds: float
    tokens_sha256: str


def measure_loop(files: Sequence[Path], tokenizer: str, eod_id: int, workers: int, folder: Path) -> Turn:
    """Run the plain loop in a process of its own."""
    output = folder / "loop.npy"
    command = [sys.executable, "-c", PLAIN_LOOP, str(output), tokenizer, str(eod_id), str(workers), *map(str, files)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers)}
    before, began = children_seconds(), time.monotonic()
    subprocess.run(command, check=True, env=environment)
    cpu_seconds, wall_seconds = children_seconds() - before, time.monotonic() - began
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    output.unlink()
    return Turn("encode_files", workers, cpu_seconds, wall_seconds, digest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, and print."""
    from megatron_fanformer.data.tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", required=True, help="JSON lines")
    parser.add_argument("--work", type=Path, required=True, help="folder for the outputs")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="(1 2)")
    parser.add_argument("--turns", type=int, default=3, help="of each (3)")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer, size = load_tokenizer(options.tokenizer), sum(map(json_bytes, options.corpus))
    files = sorted(options.corpus)
    turns: list[Turn] = []
    for _ in range(options.turns):
        for workers in options.workers:
            ours = measure_command(files, size, options.tokenizer, "gigatoken", workers, options.work)
            turns.append(Turn("prepare", workers, ours.cpu_seconds, ours.wall_seconds, ours.tokens_sha256))
            turns.append(measure_loop(files, str(tokenizer.path), tokenizer.eod_id, workers, options.work))
    print_turns(turns, size)
    return 0


def print_turns(turns: Sequence[Turn], size: int) -> None:
    """The least CPU and wall seconds of each, and their ratios."""
    least = {
        (turn.name, turn.workers): [
            min(getattr(each, of) for each in turns if (each.name, each.workers) == (turn.name, turn.workers))
            for of in ("cpu_seconds", "wall_seconds")
        ]
        for turn in turns
    }
    print(f"{size / MB:.0f} MB of JSON\n{'':14}{'workers':>8}{'CPU s':>8}{'MB/CPU s':>10}{'wall s':>8}")
    for (name, workers), (cpu, wall) in least.items():
        print(f"{name:14}{workers:8}{cpu:8.2f}{size / MB / cpu:10.1f}{wall:8.2f}")
    for workers in dict.fromkeys(turn.workers for turn in turns):
        ours, loop = least["prepare", workers], least["encode_files", workers]
        cpu, wall = loop[0] / ours[0], loop[1] / ours[1]
        print(f"{workers} workers: prepare makes {cpu:.2f} times the loop's MB per CPU second, {wall:.2f} per second")
    for name in ("prepare", "encode_files"):
        walls = {workers: wall for (whose, workers), (_, wall) in least.items() if whose == name}
        fewest, most = min(walls), max(walls)
        print(f"{name}: {walls[fewest] / walls[most]:.2f} times as fast with {most} workers as with {fewest}")
    print("the same tokens" if len({turn.tokens_sha256 for turn in turns}) == 1 else "the tokens differ")


if __name__ == "__main__":
    sys.exit(main())
