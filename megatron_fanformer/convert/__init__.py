"""A model's weights in other formats: the authors' reference and Hugging Face.

The canonical form is Megatron's, as in this project's checkpoints. `name_table` holds all names, `reference` and
`huggingface` read and write folders, and `recognition` answers which kind of model or data is at a path.
"""
