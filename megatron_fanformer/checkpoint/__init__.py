"""A run's checkpoints: saving, publishing and loading, in any layout, in megatron-core's torch_dist format."""
