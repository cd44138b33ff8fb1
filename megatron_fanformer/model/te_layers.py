"""Layers for the Transformer Engine spec beyond megatron-core's wrappers; importable only where the Engine is."""

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
    """A column parallel linear layer that reads the whole X_F on every rank, and does not sum the gradient of X_F.

    FAN sums the gradient of p | g instead; the Engine's column parallel layer would sum that of X_F, too. So the rank's
    shard is built as an unsharded layer (megatron-core's mode `duplicated`, without communication).
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
            raise ValueError("gather_output is true, but Transformer Engine's layers keep their output sharded")
        kwargs.setdefault("skip_weight_param_allocation", False)  # TELinear has no default
        super().__init__(
            input_size,
            divide(output_size, tp_group.size()),
            parallel_mode="duplicated",  # a whole layer to the Engine, which then does not communicate
            config=without_sequence_parallel(config),
            **kwargs,
        )
        self.shard_group = tp_group
        for parameter in self.parameters():
            # Without a parallel mode the Engine marks only the weight: the gradient norm would count one rank's bias.
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the rank's rows as shards of the whole matrix."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.shard_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],  # megatron-core always states the group
        )


class FANTELayerNormColumnParallelLinear(TELayerNormColumnParallelLinear):
    """The input norm and the FAN map of the `column` form.

    megatron-core's overlap of tensor parallel communication knows only four names of layers. This map takes QKV's name,
    since it gathers the sequence in place of QKV.
    """

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name="qkv", **kwargs)  # megatron-core knows no name of FAN's own


class ReplicatedTELinear(TELinear):
    """`local_layers.ReplicatedLinear` by Transformer Engine: megatron-core's mode `duplicated`, without `tp_group`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool,
        tp_group: Any,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("skip_weight_param_allocation", False)  # TELinear has no default
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            tp_comm_buffer_name=None,  # an unknown name turns off the overlap of all later layers
            **kwargs,
        )
        for parameter in self.parameters():
            # The Engine marks a weight as a shard in every mode: the gradient norm would count every rank's copy.
            parameter.tensor_model_parallel = False


class PartOfHeadsTEDotProductAttention(TEDotProductAttention):
    """Core attention over whole sequences for a context parallel rank's part of the heads (`attention.HeadExchange`).

    The Engine's own exchange of heads (`cp_comm_type` a2a) takes no float32, and only documents whose lengths are
    multiples of twice the number of ranks.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        local_config, ranks = copy.copy(config), config.context_parallel_size
        local_config.num_attention_heads = divide(config.num_attention_heads, ranks)
        local_config.num_query_groups = divide(config.num_query_groups, ranks)
        local_config.context_parallel_size = 1
        super().__init__(local_config, *args, **kwargs)


# The Engine's older name takes the same positional arguments: enabled, calibrating, recipe.
_autocast = getattr(engine, "autocast", None) or engine.fp8_autocast


class _OutsideFP8:
    """A mix-in, inherited before a layer of the Engine: computes in the weights' type while other layers are in FP8."""

    def forward(self, x_sbh: torch.Tensor) -> Any:
        """Return the output of the layer after this class, computed outside FP8."""
        forward = super().forward  # type: ignore[misc]  # the layer comes after this class
        if not FP8GlobalStateManager.is_fp8_enabled():
            return forward(x_sbh)
        with _autocast(False, False, FP8GlobalStateManager.get_fp8_recipe()):  # neither enabled nor calibrating
            return forward(x_sbh)


class BF16FANTELayerNormColumnParallelLinear(_OutsideFP8, FANTELayerNormColumnParallelLinear):
    """The input norm and the FAN map of the `column` form, never in FP8."""


class BF16ReplicatedTELinear(_OutsideFP8, ReplicatedTELinear):
    """The FAN map of the `sequence` form, never in FP8."""


def fuse_gradient_accumulation(chunk: torch.nn.Module) -> None:
    """Make the Engine's layers add weight gradients to the main gradients inside the product, by cuBLAS.

    megatron-core's own flag is not set: its output layer would follow the flag, too, and fail without apex's kernel.
    megatron-core's data parallel wrapper must have allocated the main gradients before the first backward.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  # not a field of every module
