"""What the benchmarks share: the ranks that train, matrix rates; of single layers, turns."""
