"""`megatron-fanformer convert`, as a script: `... SOURCE DESTINATION --to {megatron,hf,reference}`."""

import sys
from collections.abc import Sequence

from megatron_fanformer.cli import main as run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `convert` with these arguments (this process's own); returns its exit code."""
    return run_command(["convert", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
