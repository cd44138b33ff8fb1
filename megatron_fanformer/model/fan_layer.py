"""The FAN projection and its two tensor parallel forms.

Source: "Reasoning is Periodicity?" (NeurIPS 2025), equation of X_F; the forms are this project's design.

- `column`: each of T tensor parallel ranks owns P/T periodic and G/T linear rows of the map; the pre-activation p | g
  is gathered, (1 - p_ratio) h wide, and cos and sin are taken after the gather, into the canonical order
  [cos p, sin p, g]. In backward the gather is a reduce-scatter.
- `sequence`: each rank applies the whole, replicated map to its part of the sequence, and moves nothing; the
  layer behind it gathers X_F along the sequence, as it would gather X. The map's gradients are summed over the ranks
  once per step.

One map may feed two outputs (placement `qk_and_v`): its rows are then [p | g] of the first, [p | g] of the second, and
the norm, the product and the communication in front of them happen once.

The functions between the map and the layer that reads X_F are in `fan_functions`.

Shapes: s sequence, b micro batch, T tensor parallel ranks, h hidden size, w an output's width, v that of the values, P
periodic and G = w - 2P linear rows of an output, k the rows of one rank, of all outputs, o those of the layer that
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
)
from megatron_fanformer.runtime.layout import FANForm

PARAMETERS = ("linear", "v_linear")
"""Names in checkpoints of the rows that make each output, in order: X_F, and the values."""


class FANProjection(MegatronModule):
    """X [s, b, h] -> X_F [s, b, h] (and the values [s, b, v] at placement `qk_and_v`).

    In the `column` form both are whole on every rank, and their gradients must come in as each rank's part: the layer
    behind must not sum them (see `ActivatedColumnParallelLinear`). Under sequence parallelism X is this rank's part
    of the sequence, which the map itself gathers. In the `sequence` form both are of this rank's part of the sequence.

    Args:
        linear: builder of the linear map, column parallel or replicated as the form asks (with the input norm fused
            into it, or without).
        recompute: compute the outputs again in backward; call `discard` after the layer that reads them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        fan: FANConfig,
        form: FANForm,
        linear: Callable[..., torch.nn.Module],
        tp_group: dist.ProcessGroup,
        recompute: bool = False,
    ) -> None:
        super().__init__(config=config)
        outputs = fan.outputs(config.hidden_size, config.num_query_groups * config.kv_channels)
        # A T-th of the rows of each kind in the `column` form, all of them in the `sequence` form.
        rank, ranks = (tp_group.rank(), tp_group.size()) if form == "column" else (0, 1)
        self.shard = FANShard.of_rank(rank, ranks, [FANOutput.of_width(*output) for output in outputs])
        self.activation = Activation(self.shard, tp_group, fan.activation == "gelu", recompute)
        self._checkpoint: CheckpointWithoutOutput | None = None
        rows = sum(self.shard.whole(number).rows for number in range(len(self.shard.outputs)))
        self.linear = linear(
            config.hidden_size,
            rows,
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
        """X [s, b, h] (normed already, unless the norm is fused into the map) -> its outputs [s, b, w]."""
        pre_sbk = self.pre_activation(x_sbh)
        if not (self.activation.recompute and torch.is_grad_enabled()):
            return self._activate(pre_sbk)
        self._checkpoint = CheckpointWithoutOutput(fp8=None)  # its function has no FP8
        made: tuple[Tensor, ...] = self._checkpoint.checkpoint(self._activate, pre_sbk)
        return made

    def _activate(self, pre_sbk: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = FANActivation.apply(pre_sbk, self.activation)
        return made

    def discard(self, read: Tensor) -> None:
        """Free the outputs, if they are recomputed: that will be once the gradient of `read` is known.

        Args:
            read: the output of the layer that reads X_F. Nothing else may use X_F by now, but to give it its gradient.
        """
        if self._checkpoint is not None:
            self._checkpoint.discard_output_and_register_recompute(read)
            self._checkpoint = None

    def pre_activation(self, x_sbh: Tensor) -> Tensor:
        """Map X [s, b, h] to p | g of this rank's rows [s, b, k], for a layer that computes the outputs itself."""
        pre_sbk, _ = self.linear(x_sbh)
        return pre_sbk

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the map's rows under their places in the canonical [p | g] maps, whatever the layout and form."""
        linear: Any = self.linear  # a module whose class the layer spec chooses
        state = linear.sharded_state_dict(f"{prefix}linear.", sharded_offsets, metadata)
        for name in ("weight", "bias"):
            key = f"{prefix}linear.{name}"
            if key in state:
                ranges = canonical_rows(self.shard, [f"{part}.{name}" for part in PARAMETERS])
                state[key] = canonical_factory(state[key], f"{PARAMETERS[0]}.{name}", ranges)
        return state


# -- the layer that reads X_F


def without_sequence_parallel(config: TransformerConfig) -> TransformerConfig:
    """Return a copy for the layer after FAN, whose input is whole on every rank: it must not be gathered again."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return config


class ActivatedColumnParallelLinear(ColumnParallelLinear):
    """A column parallel linear of X_F, which it makes itself of p | g of all ranks (see `FANActivationAndProduct`).

    X_F is whole on every rank, so nothing is gathered for this layer, and its input gradient is not summed: that of
    p | g is.
    """

    activation: Activation
    """Makes X_F; the FAN map's, set once there is one."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=without_sequence_parallel(config), disable_grad_reduce=True, **kwargs)

    def forward(self, pre_sbk: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """p | g of this rank's rows [s, b, k] -> [s, b, o], and in the bias' place all of the map's outputs [s, b, w].

        X_F is the first of those, without a gradient.
        """
        product_sbo, *made = FANActivationAndProduct.apply(
            pre_sbk, self.weight, self.activation, self.gradient_accumulation_fusion
        )
        return product_sbo if self.bias is None else product_sbo + self.bias, tuple(made)


# -- as checkpoints hold them: the whole of each kind of row (periodic, linear), one kind after the other


class CanonicalRange(NamedTuple):
    """A run of a parameter's rows, or columns, and where it belongs in a whole tensor."""

    name: str
    """Ending of the whole tensor's key."""
    start: int
    end: int
    canonical_start: int
    whole: int
    """Number of rows, or columns, of the whole tensor."""


def canonical_rows(shard: FANShard, names: Sequence[str]) -> list[CanonicalRange]:
    """Return where a rank's rows belong in the canonical [p | g] maps of its outputs, which have these names."""
    return [
        CanonicalRange(names[output], start, end, canonical_start, shard.whole(output).rows)
        for output, start, end, canonical_start in shard.row_ranges()
    ]


def canonical_factory(
    sharded: ShardedTensor, name: str, ranges: Sequence[CanonicalRange], dim: int = 0
) -> ShardedTensorFactory:
    """Saves a rank's parameter as ranges of whole tensors, and puts them together when loaded.

    Args:
        name: how its key ends, in place of which each range has its own.
        ranges: one after the other, all of the parameter.
        dim: 0 for ranges of rows, 1 of columns.
    """
    axis = sharded.prepend_axis_num  # stock Megatron stacks the layers of a kind along an axis in front

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
        prefix = key.removesuffix(name)  # by now with the layer's global number, or an optimizer state's name
        shards = []
        for range_ in ranges:
            offset, whole = list(sharded.global_offset), list(sharded.global_shape)
            offset[axis + dim], whole[axis + dim] = range_.canonical_start, range_.whole
            data = tensor.narrow(dim, range_.start, range_.end - range_.start)[(None,) * axis]
            shards.append(
                replace(
                    sharded,
                    key=prefix + range_.name,
                    data=data,
                    dtype=tensor.dtype,
                    local_shape=tuple(data.shape),
                    prepend_axis_num=0,
                    global_shape=tuple(whole),
                    global_offset=tuple(offset),
                    axis_fragmentations=None,  # kinds differ in size: no regular grid
                    replica_id=replica_id,
                )
            )
        return shards

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten(0, axis) for part in parts], dim)

    return ShardedTensorFactory(sharded.key, sharded.data, build, merge, sharded.replica_id)
