"""Entry point of `megatron-fanformer VERB` and `python -m megatron_fanformer VERB`: the command's first moments."""

import gc
import sys


def entry_point() -> None:
    """Run the installed command; a package that is missing ends it with a line and exit code 2."""
    try:
        from megatron_fanformer.cli import main
    except ModuleNotFoundError as error:
        from megatron_fanformer.errors import InputError, not_installed

        print(f"megatron-fanformer: {not_installed(error)}", file=sys.stderr)
        sys.exit(InputError.exit_code)
    code = main()
    if "triton" not in sys.modules:  # which, where it is not collected, reports leaks in dozens of lines
        gc.freeze()  # or Python would look through all of torch for garbage before it ends, for a second
    sys.exit(code)


if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    entry_point()
