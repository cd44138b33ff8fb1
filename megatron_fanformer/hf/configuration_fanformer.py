"""Configuration of FANformer for transformers.

This file and `modeling_fanformer.py` are copied verbatim into every exported folder, so they import torch and
transformers alone.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

FAN_ACTIVATIONS = ("none", "gelu")
FAN_PLACEMENTS = ("qkv", "none")


class FANformerConfig(PreTrainedConfig):
    """Shape of a decoder-only language model whose attention input passes through a FAN projection.

    Pre-norm RMSNorm, rotary positions, SwiGLU, no biases except FAN's. The FAN projection maps the normed
    hidden state x, `hidden_size` wide, to [cos p, sin p, g] with [p | g] = W x + b.

    Raises:
        ValueError: a value that no FANformer can have; the message names the rule.
    """

    model_type: ClassVar[str] = "fanformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50_280
    """Token ids; rows of the embedding, without padding."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    intermediate_size: int = 8192
    """Width of the SwiGLU's inside."""
    num_hidden_layers: int = 16
    """Decoder layers."""
    num_attention_heads: int = 16
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; None for as many as query heads."""
    max_position_embeddings: int = 2048
    """Sequence length of the training, in tokens; rotary positions go on beyond it."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    p_ratio: float = 0.25
    """Share of the hidden size that is periodic, in [0, 0.5]; int(p_ratio * hidden_size) rows of W are p."""
    fan_activation: str = "none"
    """Applied to g alone: `none` or `gelu`."""
    fan_bias: bool = True
    """Whether the FAN projection has a bias b, on all rows."""
    fan_placement: str = "qkv"
    """`qkv`: queries, keys and values are projected from FAN's output; `none`: an ordinary Transformer."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding."""
    use_cache: bool = True
    """Whether keys and values of past tokens are kept while generating."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def periodic_size(self) -> int:
        """P, the rows of the FAN projection whose cos and sin are taken."""
        return int(self.p_ratio * self.hidden_size)

    def _problems(self) -> list[str]:
        found = []
        if self.hidden_size % (2 * self.num_attention_heads):
            found.append(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"{self.num_attention_heads}, since rotary positions turn pairs"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            found.append(
                f"num_key_value_heads {self.num_key_value_heads} must divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if not 0.0 <= self.p_ratio <= 0.5:
            found.append(f"p_ratio {self.p_ratio} must lie in [0, 0.5], since both cos and sin of p are used")
        if self.fan_activation not in FAN_ACTIVATIONS:
            found.append(f"fan_activation {self.fan_activation!r} must be one of {FAN_ACTIVATIONS}")
        if self.fan_placement not in FAN_PLACEMENTS:
            found.append(f"fan_placement {self.fan_placement!r} must be one of {FAN_PLACEMENTS}")
        return found
