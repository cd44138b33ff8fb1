"""What the benchmarks share: the ranks that train, matrix rates, breakdowns; of single layers, turns."""
