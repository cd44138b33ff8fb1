"""What the benchmarks of training share: cases, the ranks that run them, matrix rates and breakdowns."""
