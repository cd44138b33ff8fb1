"""Measures perplexity sets and downstream tasks in any parallel layout: during training, and by `evaluate`."""
