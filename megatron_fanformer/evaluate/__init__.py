"""Perplexity sets and downstream tasks, measured in any layout: in the loop, and by `megatron-fanformer evaluate`."""
