"""A pipeline stage of the model on megatron-core's model class: `HybridModel` from 0.19 on, `GPTModel` before."""
