"""From Dolma documents to token files (.bin/.idx), and from those to the micro batches of training."""
