"""Layers for the Transformer Engine spec beyond megatron-core's own wrappers; imports only where the Engine does."""

import copy
from typing import Any

import torch
import transformer_engine.pytorch as engine
from megatron.core.extensions.transformer_engine import (
    FP8GlobalStateManager,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

from megatron_fanformer.model.fan_layer import without_sequence_parallel


class WholeInputTEColumnParallelLinear(TELinear):
    """A column parallel linear whose input is whole on every rank and whose input gradient is summed by its maker.

    The Engine's own column parallel layer sums its input gradient inside. So each rank's shard is built as a plain
    layer of that size (megatron-core's `duplicated` mode: no communication at all), and marked as a shard, for the
    gradient norm and for checkpoints.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        gather_output: bool,
        tp_group: Any,
        **kwargs: Any,
    ) -> None:
        if gather_output:
            raise ValueError("gather_output is true; Transformer Engine layers keep their output sharded")
        kwargs.setdefault("skip_weight_param_allocation", False)
        super().__init__(
            input_size,
            divide(output_size, tp_group.size()),
            parallel_mode="duplicated",
            config=without_sequence_parallel(config),
            **kwargs,
        )
        self.shard_group = tp_group
        for parameter in self.parameters():
            # the Engine has set it already, as for a plain layer
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return shards along the output rows."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.shard_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class FANTELayerNormColumnParallelLinear(TELayerNormColumnParallelLinear):
    """The input norm and the FAN map of the `column` form.

    It takes QKV's place in front of the sequence's gather, and so QKV's name in megatron-core's overlap of tensor
    parallel communication, which knows four names and none of FAN's.
    """

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name="qkv", **kwargs)


class ReplicatedTELinear(TELinear):
    """Transformer Engine's form of `ReplicatedLinear`: megatron-core's `duplicated` mode is exactly that."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool,
        tp_group: Any,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            tp_comm_buffer_name=None,  # a name that it does not know turns the overlap of every later layer off
            skip_weight_param_allocation=skip_weight_param_allocation,
            **kwargs,
        )
        for parameter in self.parameters():
            # The Engine marks every weight as a shard: the gradient norm would count this one on each rank.
            parameter.tensor_model_parallel = False


class PartOfHeadsTEDotProductAttention(TEDotProductAttention):
    """Core attention of whole sequences, with a context parallel rank's part of the heads (`attention.HeadExchange`).

    The Engine's own exchange of heads (`cp_comm_type` a2a) takes documents whose lengths are multiples of twice the
    ranks, and no float32.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        part, ranks = copy.copy(config), config.context_parallel_size
        part.num_attention_heads = divide(config.num_attention_heads, ranks)
        part.num_query_groups = divide(config.num_query_groups, ranks)
        part.context_parallel_size = 1
        super().__init__(part, *args, **kwargs)


# Enabled or not, calibrating or not, recipe: the same positions under the Engine's older name for it.
_autocast = getattr(engine, "autocast", None) or engine.fp8_autocast


class _OutsideFP8:
    """Runs a Transformer Engine layer in the weights' own type while the layers around it are in FP8."""

    def forward(self, x_sbh: torch.Tensor) -> Any:
        """As the layer's own."""
        forward = super().forward  # type: ignore[misc]  # the layer comes after this class
        if not FP8GlobalStateManager.is_fp8_enabled():
            return forward(x_sbh)
        with _autocast(False, False, FP8GlobalStateManager.get_fp8_recipe()):
            return forward(x_sbh)


class BF16FANTELayerNormColumnParallelLinear(_OutsideFP8, FANTELayerNormColumnParallelLinear):
    """The input norm and the FAN map of the `column` form, never in FP8."""


class BF16ReplicatedTELinear(_OutsideFP8, ReplicatedTELinear):
    """The FAN map of the `sequence` form, never in FP8."""


def fuse_gradient_accumulation(chunk: torch.nn.Module) -> None:
    """Let the Engine's layers add their weight gradients to the main gradients inside the product, by cuBLAS.

    megatron-core's flag for the same would ask its own output layer for apex's kernel, and fail where that is missing.
    The weights must be in megatron-core's data parallel wrapper when backward runs: it makes the main gradients.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  # not a field of every module
