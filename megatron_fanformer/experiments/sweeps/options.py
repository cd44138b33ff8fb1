"""The options of `sweep`. Imports nothing that takes time: every command's parser reads it."""

import argparse
from pathlib import Path

ACTIONS = ("dry-run", "run", "status", "report")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `sweep` takes."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the sweep (YAML), such as examples/sweeps/variants.yaml")
    add(
        "action",
        choices=ACTIONS,
        help="dry-run: list the cells and what they cost; run: train those that are not complete, one after the other; "
        "status: how far each is; report: tables, intervals, pictures, result.json in the sweep's folder",
    )
    add(
        "--slurm",
        type=Path,
        metavar="SCRIPT",
        help="with run: write a Slurm array by this script for one run; start none",
    )
    add("--gpu", metavar="NAME_OR_FILE", help="with dry-run: the machine whose time is estimated, as plan takes it")
    add("--gpus", type=int, default=1, metavar="N", help="with --gpu: how many train a cell (1)")
