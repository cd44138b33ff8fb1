"""The verb `inspect`: a path's content, whether it is intact, and which documents a training step reads."""
