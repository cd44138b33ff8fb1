"""Self-attention whose QKV input passes through FAN, and the plain-torch parts of the local layer spec.

Shapes: s sequence, b micro batch, h hidden size, n heads of this rank, d head size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.fan_layer import FANProjection


@dataclass
class FANSelfAttentionSubmodules(SelfAttentionSubmodules):
    """What a FAN self-attention is made of: Megatron's parts, and the FAN map's linear layer."""

    fan_linear: Callable[..., torch.nn.Module] | None = None


class FANSelfAttention(SelfAttention):
    """Megatron's self-attention; queries, keys and values are projected from X_F in place of X.

    `linear_qkv` must take an input that is whole on every rank and leave its gradient unsummed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: FANSelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        fan: FANConfig,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        assert submodules.fan_linear is not None, "the layer spec names no linear layer for the FAN map"
        self.fan = FANProjection(config, fan=fan, linear=submodules.fan_linear, tp_group=self.pg_collection.tp)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queries, keys and values [s, b, n, d] of hidden states [s, b, h] (this rank's part under SP)."""
        return super().get_query_key_value_tensors(self.fan(hidden_states), *args, **kwargs)


def without_sequence_parallel(config: TransformerConfig) -> TransformerConfig:
    """A copy for the layer behind FAN, whose input is whole on every rank: it must not be gathered again."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return config


class WholeInputColumnParallelLinear(ColumnParallelLinear):
    """A column parallel linear whose input is whole on every rank and whose input gradient is summed by its maker."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=without_sequence_parallel(config), disable_grad_reduce=True, **kwargs)


class TorchCoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v by torch's scaled-dot-product attention, which holds no s x s matrix.

    Takes what Megatron hands to any core attention; masks other than causal and none, packed sequences and dropout
    are refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_ignored: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout is {config.attention_dropout}; the local core attention has none")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_ignored: Any,
    ) -> Tensor:
        """Queries [s, b, n, d], keys and values [s, b, n or fewer, d] -> [s, b, n * d]."""
        mask_type = attn_mask_type or self.attn_mask_type
        if (
            mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask)
            or packed_seq_params
            or attention_bias is not None
        ):
            raise ValueError(f"the local core attention has causal masks only, not {mask_type}")
        # Heads shared by several queries are repeated: with enable_gqa torch leaves its fused CPU kernel.
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context_bnsd = F.scaled_dot_product_attention(
            query, key, value, is_causal=mask_type == AttnMaskType.causal, scale=self.softmax_scale
        )
        return context_bnsd.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(torch.nn.Module):
    """RMSNorm that tells Megatron to sum its weight's gradient under sequence parallelism.

    (megatron-core's wrapper of torch's own refuses to run there.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis; the mean square is taken in float32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
