"""The FAN projection and its tensor parallel form.

Source: "Reasoning is Periodicity?" (NeurIPS 2025), equation of X_F, and the design's `column` form: each of T tensor
parallel ranks owns P/T periodic and G/T linear rows of the map; the pre-activation p | g is gathered, (1 - p_ratio) h
wide, and cos and sin are taken after the gather, into the canonical order [cos p, sin p, g].

Shapes: s sequence, b micro batch, t tensor parallel ranks, h hidden size, P periodic and G = h - 2P linear rows,
k = (P + G) / T rows of one rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.config import FANConfig


class FANShard(NamedTuple):
    """The rows of the FAN map that one tensor parallel rank owns."""

    ranks: int
    rank: int
    periodic: int
    """P / T"""
    linear: int
    """G / T"""

    def pieces(self) -> list[tuple[int, int, int]]:
        """(first row, end row, first row in the canonical [p | g] map) of this rank's periodic and linear rows."""
        periodic = (0, self.periodic, self.rank * self.periodic)
        linear_start = self.ranks * self.periodic + self.rank * self.linear
        linear = (self.periodic, self.periodic + self.linear, linear_start)
        return [piece for piece in (periodic, linear) if piece[1] > piece[0]]


class FANActivation(torch.autograd.Function):
    """p | g of every rank -> X_F = [cos p, sin p, g], whole on each rank; the gradient is summed over ranks once.

    Backward takes cos p and sin p from X_F, which the QKV map keeps anyway; nothing else is saved, except g where
    an activation follows it.
    """

    @staticmethod
    def forward(ctx: Any, pre_sbk: Tensor, shard: FANShard, group: dist.ProcessGroup, gelu: bool) -> Tensor:
        """Gathers the pre-activation [s, b, k] of all ranks and returns X_F [s, b, h]."""
        pre_sbtk = _gather(pre_sbk, shard.ranks, group).permute(1, 2, 0, 3)
        phase_sbtp, g_sbtg = pre_sbtk.split([shard.periodic, shard.linear], dim=-1)
        x_f = pre_sbk.new_empty(*pre_sbk.shape[:2], shard.ranks * (2 * shard.periodic + shard.linear))
        cos_sbtp, sin_sbtp, out_sbtg = _canonical_views(x_f, shard)
        phase_sbtp = phase_sbtp.float()  # a bf16 phase of 100 would be off by half a radian
        cos_sbtp.copy_(phase_sbtp.cos())
        sin_sbtp.copy_(phase_sbtp.sin())
        out_sbtg.copy_(F.gelu(g_sbtg) if gelu else g_sbtg)
        ctx.save_for_backward(x_f, g_sbtg.contiguous() if gelu else None)
        ctx.shard, ctx.group = shard, group
        return x_f

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """d p = d sin p * cos p - d cos p * sin p, from each rank's part of the gradient of X_F."""
        x_f, g_sbtg = ctx.saved_tensors
        shard: FANShard = ctx.shard
        grad_x_f = grads[0].contiguous()
        grad_cos, grad_sin, grad_g = _canonical_views(grad_x_f, shard)
        cos_sbtp, sin_sbtp, _ = _canonical_views(x_f, shard)
        grad_pre_tsbk = x_f.new_empty(shard.ranks, *x_f.shape[:2], shard.periodic + shard.linear)
        grad_phase, grad_linear = grad_pre_tsbk.permute(1, 2, 0, 3).split([shard.periodic, shard.linear], dim=-1)
        grad_phase.copy_(grad_sin.float() * cos_sbtp - grad_cos.float() * sin_sbtp)
        grad_linear.copy_(grad_g if g_sbtg is None else _gelu_backward(grad_g, g_sbtg))
        return _reduce_scatter(grad_pre_tsbk, shard.ranks, ctx.group), None, None, None


def _canonical_views(x_f: Tensor, shard: FANShard) -> tuple[Tensor, Tensor, Tensor]:
    """cos p [s, b, t, P/T], sin p [s, b, t, P/T] and g [s, b, t, G/T] as views of X_F."""
    periodic = shard.ranks * shard.periodic
    parts = x_f.split([periodic, periodic, x_f.shape[-1] - 2 * periodic], dim=-1)
    cos, sin, g = (part.unflatten(-1, (shard.ranks, part.shape[-1] // shard.ranks)) for part in parts)
    return cos, sin, g


def _gelu_backward(grad: Tensor, g: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, g)


def _gather(pre_sbk: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    if ranks == 1:
        return pre_sbk.unsqueeze(0)
    gathered_tsbk = pre_sbk.new_empty(ranks, *pre_sbk.shape)
    dist.all_gather_into_tensor(gathered_tsbk.flatten(0, 1), pre_sbk.contiguous(), group=group)
    return gathered_tsbk


def _reduce_scatter(grad_tsbk: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    if ranks == 1:
        return grad_tsbk.squeeze(0)
    grad_sbk = torch.empty_like(grad_tsbk[0])
    dist.reduce_scatter_tensor(grad_sbk, grad_tsbk.flatten(0, 1), group=group)
    return grad_sbk


class FANProjection(MegatronModule):
    """X [s, b, h] -> X_F [s, b, h], whole on every tensor parallel rank.

    Under sequence parallelism X is this rank's part of the sequence, which the map itself gathers. X_F's gradient
    must come in as each rank's own part: what follows must not sum it (see `WholeInputColumnParallelLinear`).

    Args:
        linear: builder of a column parallel linear map (with the input norm fused into it, or without).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        fan: FANConfig,
        linear: Callable[..., torch.nn.Module],
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        periodic = int(fan.p_ratio * config.hidden_size)
        rows = config.hidden_size - periodic
        ranks = tp_group.size()
        if periodic % ranks or rows % ranks:
            raise ValueError(
                f"the FAN map's {periodic} periodic and {rows - periodic} linear rows do not divide over tensor "
                f"parallel size {ranks}; choose a p_ratio for which both do"
            )
        self.shard = FANShard(ranks, tp_group.rank(), periodic // ranks, (rows - periodic) // ranks)
        self.tp_group = tp_group
        self.gelu = fan.activation == "gelu"
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

    def forward(self, x_sbh: Tensor) -> Tensor:
        """X [s, b, h] (normed already, unless the norm is fused into the map) -> X_F [s, b, h]."""
        pre_sbk, _ = self.linear(x_sbh)
        return FANActivation.apply(pre_sbk, self.shard, self.tp_group, self.gelu)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The map's shards under their places in the canonical [p | g] rows, which no layout changes."""
        linear: Any = self.linear  # a module whose class the layer spec chooses
        state = linear.sharded_state_dict(f"{prefix}linear.", sharded_offsets, metadata)
        for name in ("weight", "bias"):
            key = f"{prefix}linear.{name}"
            if key in state:
                state[key] = _canonical_factory(state[key], self.shard)
        return state


def _canonical_factory(sharded: ShardedTensor, shard: FANShard) -> ShardedTensorFactory:
    """Saves one rank's rows [p | g] as two pieces of the canonical map, and puts them together when loaded."""
    axis = sharded.prepend_axis_num

    @torch.no_grad()
    def build(key: str, rows: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
        pieces = []
        for start, end, canonical_start in shard.pieces():
            offset = list(sharded.global_offset)
            offset[axis] = canonical_start
            pieces.append(
                replace(
                    sharded,
                    key=key,
                    data=rows[start:end],
                    dtype=rows.dtype,
                    local_shape=tuple(rows[start:end].shape),
                    global_offset=tuple(offset),
                    axis_fragmentations=None,  # p and g pieces differ in size: no regular grid
                    replica_id=replica_id,
                )
            )
        return pieces

    @torch.no_grad()
    def merge(pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces)

    return ShardedTensorFactory(sharded.key, sharded.data, build, merge, sharded.replica_id)
