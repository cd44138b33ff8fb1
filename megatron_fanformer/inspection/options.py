"""The options of `inspect`; imports nothing that is slow."""

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `inspect` takes."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="token files (a prefix, one of them, a blend file, a folder), a run or a checkpoint or the URL of one, an "
        "exported folder",
    )
    parser.add_argument("--verify", action="store_true", help="check that all of it is present and undamaged")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--phases", metavar="FILE", help="draw the phase health that a run has logged into this PNG")
    parser.add_argument("--step", type=int, help="show the samples of this training step, of a run or of --config")
    parser.add_argument("--config", metavar="FILE", help="with --step: the configuration that trains on PATH")
    parser.add_argument("--full", action="store_true", help="with --step: whole texts")
    parser.epilog = "With --step, fields of the configuration can be set as --section.field VALUE, after PATH."
