"""The FAN projection and its two tensor parallel forms.

Source: "Reasoning is Periodicity?" (NeurIPS 2025), equation of X_F; the forms are this project's design.

- `column`: each of T tensor parallel ranks owns P/T periodic and G/T linear rows of the map. Forward gathers the
  pre-activation p | g, (1 - p_ratio) h wide, and then takes cos and sin, in the order [cos p, sin p, g]. Backward
  reduce-scatters the gradient of p | g.
- `sequence`: each rank applies the whole map to its part of the sequence, and communicates nothing; the next layer
  gathers X_F along the sequence, as it would gather X. The map's gradients are summed over the ranks once per step.

One map may make two outputs (placement `qk_and_v`): its rows are then [p | g] of the first, [p | g] of the second, and
the norm, the product and the communication in front of them happen once.

Shapes: s sequence, b micro batch, T tensor parallel ranks, h hidden size, w width of an output, v width of the values,
P periodic and G = w - 2P linear rows of an output, k a rank's rows of all outputs, o a rank's rows of the layer that
reads X_F.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.fan_functions import (
    Activation,
    FANActivation,
    FANActivationAndProduct,
    FANOutput,
    FANShard,
    RowRange,
)
from megatron_fanformer.runtime.layout import FANForm

PARAMETERS = ("linear", "v_linear")
"""Names of the maps in checkpoints: the map to X_F, and the map to the values."""


class FANOptions(NamedTuple):
    """How to build a FAN map."""

    fan: FANConfig
    form: FANForm = "column"
    recompute: bool = False
    """Whether backward recomputes the outputs; call `free_outputs_until_backward_of` after the layer that reads X_F."""


class FANProjection(MegatronModule):
    """X [s, b, h] -> X_F [s, b, h] (and the values [s, b, v] at placement `qk_and_v`).

    In the `column` form every rank has the whole outputs, and the gradient of p | g is summed over the ranks: the next
    layer must not sum its input gradient (see `ActivatedColumnParallelLinear`). Under sequence parallelism X is this
    rank's part of the sequence, and the map gathers X. In the `sequence` form a rank has that part of the outputs only.

    Args:
        linear: builds the linear map, column parallel or replicated to suit the form, with the input norm fused or not.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: FANOptions,
        *,
        linear: Callable[..., torch.nn.Module],
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        fan, form, recompute = options
        value_size = config.num_query_groups * config.kv_channels
        outputs = [FANOutput.of_width(*output) for output in fan.outputs(config.hidden_size, value_size)]
        rank, ranks = (tp_group.rank(), tp_group.size()) if form == "column" else (0, 1)  # `sequence`: the whole map
        self.shard = FANShard.of_rank(rank, ranks, outputs)
        self.activation = Activation(self.shard, tp_group, fan.activation == "gelu", recompute)
        self._checkpoint: CheckpointWithoutOutput | None = None
        self.linear = linear(
            config.hidden_size,
            sum(output.rows for output in outputs),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=fan.bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fan",
            tp_group=tp_group,
        )

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, ...]:
        """Map X [s, b, h] (after the input norm, unless the map has it fused) to the outputs [s, b, w]."""
        pre_sbk = self.pre_activation(x_sbh)
        if self.activation.recompute and torch.is_grad_enabled():
            self._checkpoint = CheckpointWithoutOutput(fp8=None)  # `_activate` has no FP8
            outputs: tuple[Tensor, ...] = self._checkpoint.checkpoint(self._activate, pre_sbk)
            return outputs
        return self._activate(pre_sbk)

    def _activate(self, pre_sbk: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = FANActivation.apply(pre_sbk, self.activation)
        return outputs

    def free_outputs_until_backward_of(self, product: Tensor) -> None:
        """If `recompute` is set, free the outputs until backward has the gradient of `product`, made from them."""
        if self._checkpoint is not None:
            self._checkpoint.discard_output_and_register_recompute(product)
            self._checkpoint = None

    def pre_activation(self, x_sbh: Tensor) -> Tensor:
        """Map X [s, b, h] to p | g of this rank's rows [s, b, k], for a next layer that computes the outputs itself."""
        pre_sbk, _ = self.linear(x_sbh)
        return pre_sbk

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the rank's rows as parts of the whole [p | g] maps, which are the same in every layout and form."""
        linear: Any = self.linear  # a module whose class the layer spec chooses
        state = linear.sharded_state_dict(f"{prefix}linear.", *args, **kwargs)
        for name in ("weight", "bias"):
            key = f"{prefix}linear.{name}"
            if key in state:
                names = [f"{part}.{name}" for part in PARAMETERS]
                state[key] = whole_tensor_factory(state[key], names, self.shard.row_ranges())
        return state


# -- the layer that reads X_F


def without_sequence_parallel(config: TransformerConfig) -> TransformerConfig:
    """Return a copy for a layer that reads the whole X_F on every rank, and so must not gather the sequence."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return config


class ActivatedColumnParallelLinear(ColumnParallelLinear):
    """A column parallel linear that reads p | g and computes X_F itself (see `FANActivationAndProduct`).

    Every rank has the whole X_F, so the layer gathers no input, and sums the gradient of p | g in place of X_F's.
    """

    activation: Activation
    """`FANProjection.activation`, which computes X_F; assign it after both layers are built."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=without_sequence_parallel(config), disable_grad_reduce=True, **kwargs)

    def forward(self, pre_sbk: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Map p | g of this rank's rows [s, b, k] to the product [s, b, o] and FAN's outputs [s, b, w].

        The outputs are returned where Megatron's layers return a bias; the first one, X_F, has no gradient.
        """
        product_sbo, *outputs = FANActivationAndProduct.apply(
            pre_sbk, self.weight, self.activation, self.gradient_accumulation_fusion
        )
        return product_sbo if self.bias is None else product_sbo + self.bias, tuple(outputs)


# -- checkpoints, which hold whole tensors: all periodic rows, then all linear rows


def whole_tensor_factory(
    sharded: ShardedTensor, names: Sequence[str], ranges: Sequence[RowRange], dim: int = 0
) -> ShardedTensorFactory:
    """Return a factory that saves a rank's parameter as ranges of whole tensors, and joins the ranges when loading.

    Args:
        names: how the key of each output's whole tensor ends; the parameter's own key ends with the first name.
        ranges: the ranges that the parameter consists of, in order.
        dim: 0 for ranges of rows, 1 for ranges of columns.
    """
    axes_before = sharded.prepend_axis_num  # 1 in stock Megatron, which stacks layers along an axis in front; else 0

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
        prefix = key.removesuffix(names[0])  # megatron-core has added the layer's number, or an optimizer state's name
        shards = []
        for output, start, end, whole_start, whole_size in ranges:
            global_offset, global_shape = list(sharded.global_offset), list(sharded.global_shape)
            global_offset[axes_before + dim], global_shape[axes_before + dim] = whole_start, whole_size
            data = tensor.narrow(dim, start, end - start)[(None,) * axes_before]  # adds the axes in front
            shards.append(
                replace(
                    sharded,
                    key=prefix + names[output],
                    data=data,
                    dtype=tensor.dtype,
                    local_shape=tuple(data.shape),
                    prepend_axis_num=0,
                    global_shape=tuple(global_shape),
                    global_offset=tuple(global_offset),
                    axis_fragmentations=None,  # periodic and linear rows differ in number: no regular grid
                    replica_id=replica_id,
                )
            )
        return shards

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten(0, axes_before) for part in parts], dim)  # removes the axes in front

    return ShardedTensorFactory(sharded.key, sharded.data, build, merge, sharded.replica_id)
