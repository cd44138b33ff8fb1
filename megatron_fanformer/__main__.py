"""Entry point of `megatron-fanformer VERB` and `python -m megatron_fanformer VERB`."""

import gc
import sys

from megatron_fanformer.cli import main


def entry_point() -> None:
    """Run this process's command line, and exit with its code."""
    code = main()
    if "triton" not in sys.modules:  # triton, if not collected, reports leaks in dozens of lines
        gc.freeze()  # otherwise Python spends a second on looking for garbage in torch before it ends
    sys.exit(code)


if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    entry_point()
