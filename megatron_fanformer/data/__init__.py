"""Token files, and the samples and micro batches that a training reads from them."""
