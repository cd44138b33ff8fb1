"""Entry point of `megatron-fanformer VERB` and `python -m megatron_fanformer VERB`: the command's first moments."""

import gc
import sys


def entry_point() -> None:
    """Run the installed command.

    Signals are held before anything that takes time, and output is guarded before a file is opened. A package that is
    missing ends it with a line and exit code 2.
    """
    from megatron_fanformer.processes import hold_signals
    from megatron_fanformer.terminal import guard_output

    hold_signals()
    guard_output()
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
