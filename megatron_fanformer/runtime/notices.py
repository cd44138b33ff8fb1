"""How those notices of megatron-core and torch begin that mean nothing to a user of this package: what a CPU run does
without, and names that megatron-core itself still uses.
"""

NOTICES = (
    "Transformer Engine and Apex are not installed",
    "transformer_engine and apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The 'megatron.core.transformer.custom_layers.transformer_engine'",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed._all_gather_base` is deprecated",
    "`torch.distributed._reduce_scatter_base` is deprecated",
    "torch.distributed._all_gather_base is a private function",
    "torch.distributed._reduce_scatter_base is a private function",
    "barrier(): using the device under current context",
    "When using async grad allreduce",
    "When using sequence parallelism it is recommended",
    "TypedStorage is deprecated",
    "`load_state_dict` is deprecated",
    "The argument order of load",
    "torch.distributed is disabled, unavailable",
    "MimoModelConfig is experimental",
    "If you are using transformer_engine as the transformer implementation",
    # of calls within megatron-core 0.19
    "Warning: tp_group is None, using default tp group",
    "MLP requires ffn_hidden_size, but it was not provided",
    "Could not determine rank from torch.distributed",
)
