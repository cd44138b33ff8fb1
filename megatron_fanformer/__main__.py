"""`python -m megatron_fanformer VERB`, the same as `megatron-fanformer VERB`."""

if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    from megatron_fanformer.processes import hold_signals

    hold_signals()  # before anything that takes time
    try:
        from megatron_fanformer.cli import entry_point
    except ModuleNotFoundError as error:
        import sys

        from megatron_fanformer.errors import NotInstalled

        print(f"megatron-fanformer: {NotInstalled(error)}", file=sys.stderr)
        sys.exit(NotInstalled.exit_code)
    entry_point()
