"""Model FLOPs per training token, by formula.

The multiplications and additions (2 per weight) of every matrix product are counted, and the half of causal attention
that is not masked; backward costs twice the forward. Element-wise work (norms, cos and sin, SwiGLU) is not counted.
"""

from megatron_fanformer.model.config import FANformerConfig

BACKWARD_AND_FORWARD = 3


def forward_flops_per_token(config: FANformerConfig, seq_length: int | None = None) -> int:
    """Return FLOPs of one token's forward pass, at the mean context of a sample of `seq_length` tokens."""
    return config.num_layers * layer_flops_per_token(config, seq_length) + head_flops_per_token(config)


def head_flops_per_token(config: FANformerConfig) -> int:
    """Return FLOPs of one token's logits."""
    return 2 * config.hidden_size * config.padded_vocab_size


def layer_flops_per_token(config: FANformerConfig, seq_length: int | None = None) -> int:
    """Return FLOPs of one token's forward pass through a layer, at the mean context, as above."""
    h = config.hidden_size
    heads = config.num_attention_heads * config.kv_channels
    qkv, fan = h * config.qkv_rows, h * config.fan_rows
    mlp = sum(rows * columns for rows, columns in config.ffn_maps)
    scores_and_context = 2 * heads * (seq_length or config.seq_length) // 2
    return 2 * (fan + qkv + heads * h + mlp + scores_and_context)


def training_flops_per_token(config: FANformerConfig, seq_length: int | None = None) -> int:
    """Return FLOPs of one token's forward and backward pass."""
    return BACKWARD_AND_FORWARD * forward_flops_per_token(config, seq_length)
