"""megatron_fanformer: pretrain FANformer language models with megatron-core, on CPUs and GPUs."""

__version__ = "0.1.0"
