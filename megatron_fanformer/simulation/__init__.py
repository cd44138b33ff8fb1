"""One rank of a large world, in one process: the trainer's own code over tensors without content."""
