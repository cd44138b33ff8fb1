"""Measures how soon the command reports an error: whole processes, from start to exit.

    python tools/bench_errors.py                # medians of 9 rounds
    python tools/bench_errors.py --rounds 21

The cases take turns with `python -c pass`, so that a busy machine slows all alike; its median is what Python itself
takes. The processor time is printed beside it: what remains of it on a quiet machine.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "megatron_fanformer"]


def main() -> None:
    """Time every case in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns per case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = _cases(Path(folder))
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, (command, exit_code) in cases.items():
                seconds[name].append(_timed(command, exit_code))
    for name, taken in seconds.items():
        whole, busy = ([turn[kind] for turn in taken] for kind in (0, 1))
        print(
            f"{name:30} {statistics.median(whole):6.2f} s (from {min(whole):.2f} to {max(whole):.2f}), "
            f"{statistics.median(busy):.2f} s of a processor"
        )


def _cases(folder: Path) -> dict[str, tuple[list[str], int]]:
    """By name: a command, and the exit code that it ends with."""
    file = folder / "config.yaml"
    values = {
        "model": {"preset": "fanformer-300m"},
        "data": {"train_data": [str(folder / "no-tokens")]},
        "training": {"run_dir": str(folder / "run"), "train_iters": 10, "global_batch_size": 1},
    }
    file.write_text(yaml.safe_dump(values))
    train = [*COMMAND, "train", "--config", str(file)]
    return {
        "python -c pass": ([sys.executable, "-c", "pass"], 0),
        "--help": ([*COMMAND, "--help"], 0),
        "train --help": ([*COMMAND, "train", "--help"], 0),
        "unknown option": ([*COMMAND, "generate", "x", "--prompt", "y", "--speed", "9"], 2),
        "missing configuration file": ([*COMMAND, "train", "--config", str(folder / "none.yaml")], 2),
        "unknown key": ([*train, "--model.hiden_size", "64"], 2),
        "value of the wrong type": ([*train, "--training.train_iters", "ten"], 2),
        "missing token file": (train, 2),
        "generate: no such checkpoint": ([*COMMAND, "generate", str(folder / "none"), "--prompt", "y"], 2),
        "parity: a layout that is none": ([*COMMAND, "parity", "--config", str(file), "--layouts", "tp=3"], 2),
    }


def _timed(command: list[str], exit_code: int) -> tuple[float, float]:
    """Seconds from start to exit, and seconds of a processor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != exit_code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}, not {exit_code}: {done.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
