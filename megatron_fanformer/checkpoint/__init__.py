"""Checkpoints of a run: saved, published, found and loaded; in any layout, in megatron-core's torch_dist format."""
