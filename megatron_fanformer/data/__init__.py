"""Token files, and the samples and micro batches that a training run reads from them."""
