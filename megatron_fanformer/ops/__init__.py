"""Numerical kernels that know nothing of Megatron, in PyTorch and, for GPUs, in Triton."""
