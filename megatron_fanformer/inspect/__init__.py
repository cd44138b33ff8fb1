"""The verb `inspect`: describes and verifies what is at a path, and shows the documents that a training step reads."""
