"""`python -m megatron_fanformer VERB`, the same as `megatron-fanformer VERB`."""

if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    from megatron_fanformer.processes import hold_signals

    hold_signals()  # before anything that takes time
    try:
        from megatron_fanformer.cli import entry_point
    except ModuleNotFoundError as error:
        import sys

        from megatron_fanformer.errors import InputError, not_installed

        print(f"megatron-fanformer: {not_installed(error)}", file=sys.stderr)
        sys.exit(InputError.exit_code)
    entry_point()
