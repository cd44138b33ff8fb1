"""Evaluation: perplexity sets and downstream tasks, in the loop of a run and afterwards, in every layout."""
