"""The paper's smaller experiments, each a file: the command `experiment`."""
