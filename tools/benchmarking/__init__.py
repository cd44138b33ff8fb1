"""What the benchmarks of training share: the ranks that run them, matrix rates and breakdowns."""
