"""`megatron-fanformer plan`: what a run costs on many GPUs, whether it fits, and which layout is the fastest."""
