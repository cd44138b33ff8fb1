"""What a path holds, whether it is whole, and which documents a training step reads: the verb `inspect`."""
