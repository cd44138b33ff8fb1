"""The FANformer on megatron-core's blocks: its configuration, FAN layer, attention, layer specs and build."""
