"""Entry point of `megatron-fanformer VERB` and `python -m megatron_fanformer VERB`."""

import gc
import sys


def entry_point() -> None:
    """Run this process's command line, and exit with its code."""
    from megatron_fanformer.cli import main

    code = main()
    if "triton" not in sys.modules:  # triton, if not collected, reports leaks in dozens of lines
        gc.freeze()  # otherwise Python spends a second on looking for garbage in torch before it ends
    sys.exit(code)


if __name__ == "__main__":  # workers and processes that save import this module again, but must not run the verb
    entry_point()
