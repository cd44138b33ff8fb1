"""Converts a model's weights between this project's checkpoints, the authors' format, Hugging Face's and Megatron-LM's.

`name_table` has all names of tensors and converts by way of Megatron's; `reference` and `huggingface` read and write
folders, `megatron_lm` reads them, and `recognition` tells which kind of model or data is at a path.
"""
