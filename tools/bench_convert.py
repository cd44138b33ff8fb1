"""Measures `convert` on random weights of one of the paper's sizes: seconds and peak memory of each direction.

    python tools/bench_convert.py FOLDER [--preset fanformer-1b] [--dtype fp32] [--max-shard-size 5GB]
        [--directions reference:megatron megatron:hf …]

Each direction runs in a process of its own, without and with verification. Peak memory is the most that was resident,
mapped files included; it is compared with 1.25 times the largest file of source and destination plus 1 GB. FOLDER needs
room for four copies of the weights, which stay until it is removed.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ALLOWED_SHARE, ALLOWED_MORE = 1.25, 10**9
DIRECTIONS = [
    ("reference", "megatron"),
    ("megatron", "hf"),
    ("hf", "megatron-again"),
    ("hf", "reference-again"),
    ("megatron-again", "reference-again"),
    ("reference", "hf-again"),
]
SEED = 0
WEIGHT_SUFFIXES = (".safetensors", ".distcp", ".pt")


def main() -> int:
    """Print one line per direction; returns 1 if one took more memory than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="fanformer-1b")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--max-shard-size", default="5GB")
    names = [":".join(direction) for direction in DIRECTIONS]
    parser.add_argument("--directions", nargs="+", choices=names, default=names, metavar="FROM:TO")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source = options.folder / "reference"
    if not source.exists():
        measured(lambda: make_reference(source, options.preset, options.dtype))
    print(f"{options.preset}, {options.dtype}, shards of {options.max_shard_size}, torch {torch.__version__}")
    print(f"{'direction':32} {'verified':9} {'seconds':>8} {'CPU':>7} {'peak GB':>8} {'allowed GB':>11}")
    too_much = False
    for before, after in (direction.split(":") for direction in options.directions):
        for verified in (False, True):
            too_much |= measure(options.folder / before, options.folder / after, verified, options.max_shard_size)
    return int(too_much)


def measure(source: Path, destination: Path, verified: bool, max_shard_size: str) -> bool:
    """Convert in a process of its own and print what it took; returns whether that was too much memory."""
    shutil.rmtree(destination, ignore_errors=True)
    os.sync()  # so as not to wait for what earlier work wrote
    kind = destination.name.split("-")[0]
    arguments = ["convert", str(source), str(destination), "--to", kind, "--max-shard-size", max_shard_size]
    arguments += [] if verified else ["--no-verify"]
    seconds, cpu, peak = measured(lambda: run(arguments))
    allowed = ALLOWED_SHARE * max(largest_file(source), largest_file(destination)) + ALLOWED_MORE
    print(
        f"{source.name + ' → ' + destination.name:32} {'yes' if verified else 'no':9} {seconds:8.1f} {cpu:7.1f} "
        f"{peak / 1e9:8.2f} {allowed / 1e9:11.2f}{'' if peak <= allowed else '  TOO MUCH'}",
        flush=True,
    )
    return peak > allowed


def largest_file(folder: Path) -> int:
    """Bytes of the largest file of weights under a folder."""
    return max(file.stat().st_size for file in folder.rglob("*") if file.suffix in WEIGHT_SUFFIXES)


def measured(work: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds, seconds of CPU and peak resident bytes of `work` in a process of its own."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(work())
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit("a conversion failed")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def run(arguments: list[str]) -> int:
    """A command of ours, in this process's place: what it takes is its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execv(sys.executable, [sys.executable, "-m", "megatron_fanformer", *arguments])


def make_reference(folder: Path, preset: str, dtype: str) -> int:
    """Random weights in the authors' layout."""
    from megatron_fanformer.checkpoint.full_tensors import LazyTensors
    from megatron_fanformer.formats.name_table import expected_shapes
    from megatron_fanformer.formats.reference import write_reference
    from megatron_fanformer.model.config import PRESETS
    from megatron_fanformer.model.dtypes import DTYPES

    config = PRESETS[preset]
    shapes = expected_shapes(config, "reference")
    generator = torch.Generator().manual_seed(SEED)
    meta = {name: torch.empty(shape, dtype=DTYPES[dtype], device="meta") for name, shape in shapes.items()}

    def draw(name: str) -> torch.Tensor:
        shape = shapes[name]
        drawn = torch.randn(shape, generator=generator)
        drawn = 1 + 0.1 * drawn if "norm" in name or "ln_f" in name else drawn / shape[-1] ** 0.5
        return drawn.to(DTYPES[dtype])

    folder.mkdir()
    write_reference(folder, config, LazyTensors(meta, draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
