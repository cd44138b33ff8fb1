"""Self-attention whose input passes through FAN; and any that context parallel ranks share by heads.

Shapes: s sequence, b micro batch, h hidden size, v width of all values, n heads of this rank, d head size; C context
parallel ranks, g query groups of this rank, w width of a group's queries, key and value.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.attention import Attention, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANProjection
from megatron_fanformer.runtime.layout import FANForm


@dataclass
class FANSelfAttentionSubmodules(SelfAttentionSubmodules):
    """Submodules of a FAN self-attention: Megatron's, and the FAN map's linear layer."""

    fan_linear: Any = None


class FANSelfAttention(SelfAttention):
    """Megatron's self-attention; queries, keys and values are projected from X_F in place of X.

    In the FAN map's `column` form `linear_qkv` makes X_F itself, of p | g, or it takes an input that is whole on every
    rank and leaves its gradient unsummed; in the `sequence` form it gathers the sequence, as it does without FAN.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: FANSelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        fan: FANConfig,
        fan_form: FANForm = "column",
        recompute_fan: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        _check_head_norms(config, self.q_layernorm)
        self.fan = _fan_map(self, submodules, fan, fan_form, recompute_fan)
        _connect(config, self.fan, self.linear_qkv)

    def set_for_recompute_input_layernorm(self) -> None:
        """Called by megatron-core in FP8; the layer that reads the recomputed norm is FAN's here, not QKV."""
        _keep_input_as_it_is(self.fan.linear)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queries, keys and values [s, b, n, d] of hidden states [s, b, h] (this rank's part under SP)."""
        if isinstance(self.linear_qkv, ActivatedColumnParallelLinear):
            return super().get_query_key_value_tensors(self.fan.pre_activation(hidden_states), *args, **kwargs)
        (x_f_sbh,) = self.fan(hidden_states)
        made = super().get_query_key_value_tensors(x_f_sbh, *args, **kwargs)
        self.fan.discard(made[0])
        return made


class FANValueAttention(Attention):
    """Self-attention at placement `qk_and_v`: queries and keys from X_F, values straight from a FAN layer of their own.

    `linear_qkv` of the submodules makes queries and keys here, interleaved by query group as Megatron's are.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: FANSelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        fan: FANConfig,
        fan_form: FANForm = "column",
        recompute_fan: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, attention_type="self", **kwargs)
        self.fan_form = fan_form
        self.fan = _fan_map(self, submodules, fan, fan_form, recompute_fan)
        self.linear_qk = submodules.linear_qkv(
            config.hidden_size,
            self.query_projection_size + self.kv_projection_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.pg_collection.tp,
        )
        _connect(config, self.fan, self.linear_qk)
        self.q_layernorm, self.k_layernorm = (
            norm and norm(config=config, hidden_size=self.hidden_size_per_attention_head, eps=config.layernorm_epsilon)
            for norm in (submodules.q_layernorm, submodules.k_layernorm)
        )
        _check_head_norms(config, self.q_layernorm)

    def set_for_recompute_input_layernorm(self) -> None:
        """As in `FANSelfAttention`."""
        _keep_input_as_it_is(self.fan.linear)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [s, b, n, d] of hidden states [s, b, h] (this rank's part under SP)."""
        if isinstance(self.linear_qk, ActivatedColumnParallelLinear):
            qk, (_, values) = self.linear_qk(self.fan.pre_activation(hidden_states))
        else:
            x_f_sbh, values = self.fan(hidden_states)
            qk, _ = self.linear_qk(x_f_sbh)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        qk = qk.unflatten(-1, (groups, -1, size))
        query, key = qk.split([qk.shape[-2] - 1, 1], dim=-2)
        query, key = query.flatten(2, 3), key.squeeze(-2)
        own_values = self._own_heads(values).unflatten(-1, (groups, size))
        self.fan.discard(qk)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, own_values

    def _own_heads(self, values: Tensor) -> Tensor:
        """Return this rank's heads of the values, over the whole sequence: [s, b, v / T]."""
        group = self.pg_collection.tp
        if self.fan_form == "sequence" and group.size() > 1:
            part = all_to_all_sp2hp(values, group)  # from all heads of a part of the sequence
            return part.unflatten(0, (-1, values.shape[1]))
        part = values.chunk(group.size(), dim=-1)[group.rank()]  # every rank has the whole
        return part.clone() if self.fan.activation.recompute else part  # so that attention does not keep the whole


def _fan_map(
    attention: Attention, submodules: FANSelfAttentionSubmodules, fan: FANConfig, form: FANForm, recompute: bool
) -> FANProjection:
    return FANProjection(
        attention.config,
        fan=fan,
        form=form,
        linear=submodules.fan_linear,
        tp_group=attention.pg_collection.tp,
        recompute=recompute,
    )


class HeadExchange:
    """Comes before a class of attention: context parallel ranks exchange parts of the sequence for parts of the heads.

    They hold equal parts of the sequence, in their order. Between the projections each has the whole sequence, and of
    the heads its part. So rotary positions, masks and bounds of documents are those of one rank; the attention itself
    is to be built without context parallelism, and the core attention with a part of the heads.
    """

    def __init__(self, *args: Any, context_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_group = context_group
        self.core_attention.register_forward_hook(self._own_part)  # type: ignore[attr-defined]

    def get_query_key_value_tensors(self, *args: Any, split_qkv: bool = True, **kwargs: Any) -> Any:
        """Return the output of the class after this one, [s, b, n / C, d] from [s / C, b, n, d].

        Not split: all three by groups, as one tensor, and the parts of w.
        """
        made = super().get_query_key_value_tensors(*args, split_qkv=split_qkv, **kwargs)  # type: ignore[misc]
        if not split_qkv:
            qkv, widths = made
            return self._whole_sequence(qkv), widths
        query, key, value = made
        groups, size = key.shape[2:]
        qkv = torch.cat([query.unflatten(2, (groups, -1)).flatten(3), key, value], -1)
        query, key, value = self._whole_sequence(qkv).split([qkv.shape[-1] - 2 * size, size, size], -1)
        return query.unflatten(3, (-1, size)).flatten(2, 3), key, value

    def _whole_sequence(self, qkv_sbgw: Tensor) -> Tensor:
        """[s / C, b, g, w] -> [s, b, g / C, w]."""
        _, samples, groups, width = qkv_sbgw.shape
        exchanged = all_to_all_sp2hp(qkv_sbgw.flatten(2), self.context_group)
        return exchanged.view(-1, samples, groups // self.context_group.size(), width)

    def _own_part(self, _core: Any, _inputs: Any, context: Tensor) -> Tensor:
        """[s, b, n / C * d] -> [s / C, b, n * d]; packed, without b."""
        part = all_to_all_hp2sp(context, self.context_group)
        return part.view(-1, *context.shape[1:-1], part.shape[-1])


@functools.cache
def exchanging_heads(attention: type[Attention]) -> type[Attention]:
    """Return a class of attention with `HeadExchange` before it."""
    return type(f"HeadExchange{attention.__name__}", (HeadExchange, attention), {})


def _check_head_norms(config: TransformerConfig, norm: torch.nn.Module | None) -> None:
    """Raise a ValueError where the configuration and the layer disagree on norms of heads.

    By the configuration megatron-core sums their gradients over the tensor parallel ranks.
    """
    if config.qk_layernorm != (norm is not None):
        raise ValueError(
            f"qk_layernorm is {config.qk_layernorm}, but the layer spec has "
            f"{'no norms' if config.qk_layernorm else 'norms'} of queries and keys; make it by "
            f"layer_spec(..., qk_layernorm={config.qk_layernorm})"
        )


def _connect(config: TransformerConfig, fan: FANProjection, linear: torch.nn.Module) -> None:
    """Make `linear` the reader of X_F: it makes X_F itself, or keeps it for backward as FAN does.

    In FP8 that is without an FP8 copy besides. Backward quantises X_F again, to the same numbers; scales of the past
    (`delayed`) would be others by then.
    """
    if isinstance(linear, ActivatedColumnParallelLinear):
        linear.activation = fan.activation
    if config.fp8 and config.fp8_recipe != "delayed":
        _keep_input_as_it_is(linear)


def _keep_input_as_it_is(linear: torch.nn.Module) -> None:
    from megatron.core.extensions.transformer_engine import set_save_original_input

    set_save_original_input(linear)
