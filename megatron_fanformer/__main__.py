"""Entry point of `megatron-fanformer VERB` and `python -m megatron_fanformer VERB`."""

import gc
import sys

from megatron_fanformer.cli import main


def entry_point() -> None:
    """Run the installed command."""
    code = main()
    if "triton" not in sys.modules:  # which, where it is not collected, reports leaks in dozens of lines
        gc.freeze()  # or Python would look through all of torch for garbage before it ends, for a second
    sys.exit(code)


if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    entry_point()
