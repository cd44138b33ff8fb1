"""`python -m megatron_fanformer VERB`, the same as `megatron-fanformer VERB`."""

from megatron_fanformer.cli import entry_point

if __name__ == "__main__":  # processes that megatron-core starts while it saves import this module again
    entry_point()
