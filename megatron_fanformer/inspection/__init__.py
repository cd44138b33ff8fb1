"""What a path holds, whether it is intact, and which documents a training step reads: the verb `inspect`."""
