"""The options of `report`. Imports nothing that takes time: every command's parser reads it."""

import argparse
from pathlib import Path

COMPARE = "compare"
PAGE, COMPARISON = Path("runs/report.html"), Path("runs/dynamics")  # where nothing else is named
FOLDER = "runs"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `report` takes."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="FOLDER",
        help=f"experiments, or folders of them ({FOLDER}); or the word {COMPARE}, and the folders of runs of two "
        "configurations, which may have several seeds each",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PAGE",
        help=f"a page .html, which is written as .md, too ({PAGE}); of {COMPARE} a folder ({COMPARISON})",
    )
