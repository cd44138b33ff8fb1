"""A model's weights in other formats: the authors' reference and Hugging Face.

The canonical form is Megatron's, as stored in this project's checkpoints; `name_table` holds the one table of
names, `reference` and `huggingface` the folders. `recognition` says what a path is.
"""
