"""Checkpoints of a run: saved, published, found and loaded; in any layout, by megatron-core's torch_dist format."""
