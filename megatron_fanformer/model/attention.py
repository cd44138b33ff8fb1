"""Self-attention with a FAN map in front, and the exchange of heads between context parallel ranks.

Shapes: s sequence, b micro batch, h hidden size, v width of all values, n heads of this rank, d head size; T tensor
parallel ranks, C context parallel ranks, g query groups of this rank, w width of a group's queries, key and value.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.attention import Attention, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANOptions, FANProjection


@dataclass
class FANSelfAttentionSubmodules(SelfAttentionSubmodules):
    """Submodules of a FAN self-attention: Megatron's, and the linear layer of the FAN map."""

    fan_linear: Any = None


class FANSelfAttention(SelfAttention):
    """Megatron's self-attention, with queries, keys and values projected from X_F in place of X.

    In the `column` form of the FAN map, `linear_qkv` either reads p | g and computes X_F itself, or reads the whole X_F
    on every rank and does not sum its input gradient. In the `sequence` form, as without FAN, it gathers the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: FANSelfAttentionSubmodules,
        *args: Any,
        fan: FANOptions,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        _check_head_norms(config, self.q_layernorm)
        self.fan = FANProjection(config, fan, linear=submodules.fan_linear, tp_group=self.pg_collection.tp)
        _connect(config, self.fan, self.linear_qkv)

    def set_for_recompute_input_layernorm(self) -> None:
        """In FP8, keep no copy of a norm that megatron-core recomputes: FAN's linear layer, not QKV, reads the norm."""
        _save_original_input(self.fan.linear)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return queries, keys and values [s, b, n, d] of hidden states [s, b, h] (a rank's part of s, if sharded)."""
        if isinstance(self.linear_qkv, ActivatedColumnParallelLinear):  # this layer computes X_F from p | g
            return super().get_query_key_value_tensors(self.fan.pre_activation(hidden_states), *args, **kwargs)
        (x_f_sbh,) = self.fan(hidden_states)
        qkv = super().get_query_key_value_tensors(x_f_sbh, *args, **kwargs)
        self.fan.free_outputs_until_backward_of(qkv[0])
        return qkv


class FANValueAttention(Attention):
    """Self-attention at placement `qk_and_v`: queries and keys are projected from X_F, a second FAN layer makes values.

    The submodule `linear_qkv` makes queries and keys alone, interleaved by query group as in Megatron.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: FANSelfAttentionSubmodules,
        *args: Any,
        fan: FANOptions,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, attention_type="self", **kwargs)
        self.fan_form = fan.form
        self.fan = FANProjection(config, fan, linear=submodules.fan_linear, tp_group=self.pg_collection.tp)
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
            for norm in (submodules.q_layernorm, submodules.k_layernorm)  # each a class, or None
        )
        _check_head_norms(config, self.q_layernorm)

    set_for_recompute_input_layernorm = FANSelfAttention.set_for_recompute_input_layernorm

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return queries, keys and values [s, b, n, d] of hidden states [s, b, h] (a rank's part of s, if sharded)."""
        if isinstance(self.linear_qk, ActivatedColumnParallelLinear):  # this layer computes X_F from p | g
            qk, (_x_f, values) = self.linear_qk(self.fan.pre_activation(hidden_states))
        else:
            x_f_sbh, values = self.fan(hidden_states)
            qk, _ = self.linear_qk(x_f_sbh)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        qk = qk.unflatten(-1, (groups, -1, size))  # of each group: its queries, then its key
        query, key = qk.split([qk.shape[-2] - 1, 1], dim=-2)
        query, key = query.flatten(2, 3), key.squeeze(-2)
        value = self._values_of_this_rank(values).unflatten(-1, (groups, size))
        self.fan.free_outputs_until_backward_of(qk)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value

    def _values_of_this_rank(self, values: Tensor) -> Tensor:
        """Return this rank's heads of FAN's values, over the whole sequence: [s, b, v / T]."""
        group = self.pg_collection.tp
        if self.fan_form == "sequence" and group.size() > 1:
            heads = all_to_all_sp2hp(values, group)  # `values` are all heads of a part of the sequence
            return heads.unflatten(0, (-1, values.shape[1]))  # megatron-core has joined s and b
        heads = values.chunk(group.size(), dim=-1)[group.rank()]  # `values` are whole on every rank
        return heads.clone() if self.fan.activation.recompute else heads  # a view would keep the whole for backward


class HeadExchange:
    """A mix-in, inherited before a class of attention: context parallel ranks exchange parts of the sequence for heads.

    Each rank holds an equal part of the sequence, in order. Between the projections, the rank has the whole sequence
    and a part of the heads, so rotary positions, masks and documents' bounds are those of a model on one rank. The
    attention must be built without context parallelism, and its core attention for a part of the heads.
    """

    def __init__(self, *args: Any, context_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_group = context_group
        self.core_attention.register_forward_hook(self._exchange_back)  # type: ignore[attr-defined]

    def get_query_key_value_tensors(self, *args: Any, split_qkv: bool = True, **kwargs: Any) -> Any:
        """Exchange queries, keys and values of super(), [s / C, b, n, d], for [s, b, n / C, d]: all of s, fewer heads.

        With `split_qkv` false, return one tensor [s, b, g / C, w] of all three, and the width of each one in w.
        """
        qkv = super().get_query_key_value_tensors(*args, split_qkv=split_qkv, **kwargs)  # type: ignore[misc]
        if not split_qkv:
            qkv_sbgw, widths = qkv
            return self._exchange(qkv_sbgw), widths
        query, key, value = qkv
        groups, size = key.shape[2:]
        qkv_sbgw = torch.cat([query.unflatten(2, (groups, -1)).flatten(3), key, value], -1)  # group by group
        query, key, value = self._exchange(qkv_sbgw).split([qkv_sbgw.shape[-1] - 2 * size, size, size], -1)
        return query.unflatten(3, (-1, size)).flatten(2, 3), key, value

    def _exchange(self, qkv_sbgw: Tensor) -> Tensor:
        """Exchange all groups of a part of s for some of the groups of all s: [s / C, b, g, w] -> [s, b, g / C, w]."""
        _, samples, groups, width = qkv_sbgw.shape
        exchanged = all_to_all_sp2hp(qkv_sbgw.flatten(2), self.context_group)
        return exchanged.view(-1, samples, groups // self.context_group.size(), width)

    def _exchange_back(self, _core: Any, _inputs: Any, context: Tensor) -> Tensor:
        """Exchange heads for s again after core attention: [s, b, n / C * d] -> [s / C, b, n * d]; packed: no b."""
        part = all_to_all_hp2sp(context, self.context_group)
        return part.view(-1, *context.shape[1:-1], part.shape[-1])


@functools.cache  # all layers have one subclass
def exchanging_heads(attention: type[Attention]) -> type[Attention]:
    """Return the subclass of this class of attention that exchanges heads (`HeadExchange`)."""
    return type(f"HeadExchange{attention.__name__}", (HeadExchange, attention), {})


def _check_head_norms(config: TransformerConfig, norm: torch.nn.Module | None) -> None:
    """Raise ValueError unless both the layer and the configuration have norms of heads, or neither has.

    megatron-core sums the norms' gradients over the tensor parallel ranks only if the configuration has the norms.
    """
    if config.qk_layernorm != (norm is not None):
        raise ValueError(
            f"qk_layernorm is {config.qk_layernorm}, but the layer spec has "
            f"{'no norms' if config.qk_layernorm else 'norms'} of queries and keys; make it by "
            f"layer_spec(..., qk_layernorm={config.qk_layernorm})"
        )


def _connect(config: TransformerConfig, fan: FANProjection, linear: torch.nn.Module) -> None:
    """Prepare `linear` to read the outputs of `fan`.

    A layer that computes X_F itself gets FAN's activation. A layer in FP8 keeps X_F, which FAN keeps anyway, and no FP8
    copy of X_F: backward quantizes X_F again, to the same numbers. With the recipe `delayed` the scales have changed by
    then, so the layer keeps the FP8 copy.
    """
    if isinstance(linear, ActivatedColumnParallelLinear):
        linear.activation = fan.activation
    if config.fp8 and config.fp8_recipe != "delayed":
        _save_original_input(linear)


def _save_original_input(linear: torch.nn.Module) -> None:
    """Make a layer of Transformer Engine keep its input for backward as it is, not an FP8 copy."""
    from megatron.core.extensions.transformer_engine import set_save_original_input

    set_save_original_input(linear)
