"""Transformer Engine's own Python, and megatron-core's wrappers of it, on a machine without a GPU.

The Engine is Python modules over one compiled extension. `install()` puts a stand-in for that extension in its place
(`extension.py`: functions of PyTorch in the numerics of the real ones), and tells torch and the Engine that there is
a GPU. The folder `site`, on PYTHONPATH, does so in every process that is started with it. What runs then is the
Engine's and megatron-core's code, unchanged. It shows which layer reads, sums and quantises what; it cannot show speed,
memory, the order of streams, NCCL, or the kernels' own rounding.
"""
