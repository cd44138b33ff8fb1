"""The options of `check-node`; imports nothing that is slow."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `check-node` takes."""
    add = parser.add_argument
    add("--folder", type=Path, help="of the file system that all nodes share, such as the run's; is written to")
    add("--minimum-bandwidth", type=float, metavar="GB/S", help="between two nodes (half of the nodes' median)")
    add("--tolerance", type=float, default=0.85, help="the least share of the median that a rate may be (0.85)")
    add("--gpus", type=int, metavar="N", help="GPUs that a node must show (as many as most nodes)")
    add("--time-limit", type=float, default=180.0, metavar="SECONDS", help="for a node to answer in (180)")
    add("--output", type=Path, metavar="FILE", help="write the names of the healthy nodes, one a line")
    add("--json", action="store_true", help="print one JSON object")
