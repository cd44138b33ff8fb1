"""The machine: the device, the rank grid, seeds, local launches, and megatron-core without CUDA."""
