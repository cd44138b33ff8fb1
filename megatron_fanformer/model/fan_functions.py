"""Which rows of a FAN map a tensor parallel rank owns, and the autograd functions between the map and the next layer.

The functions gather the pre-activation p | g over the ranks and take cos and sin; backward does the reverse.

Shapes: s sequence, b micro batch, n = s b tokens, t tensor parallel ranks (T of them), h hidden size, w width of an
output, P periodic and G linear rows of an output, v = G the width of g, k a rank's rows of all outputs, r a rank's rows
of one output, o a rank's rows of the layer that reads X_F.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.model.local_layers import weight_gradient
from megatron_fanformer.ops import fan_activation


class FANOutput(NamedTuple):
    """How many rows of a FAN map make one of its outputs [cos p, sin p, g]."""

    periodic: int
    linear: int

    @classmethod
    def of_width(cls, width: int, p_ratio: float) -> "FANOutput":
        """Return the rows for an output of that width."""
        periodic = int(p_ratio * width)
        return cls(periodic, width - 2 * periodic)

    @property
    def rows(self) -> int:
        """Number of the map's rows, P + G."""
        return self.periodic + self.linear

    @property
    def width(self) -> int:
        """Number of the output's features, 2 P + G: a periodic row makes a cos and a sin."""
        return 2 * self.periodic + self.linear


class RowRange(NamedTuple):
    """Consecutive rows of a FAN map on one rank, and their place in the whole map, [p | g] of one output.

    Or consecutive features that the rank computes from its rows, and their place in the whole output [cos p, sin p, g].
    """

    output: int
    """Number of the output."""
    start: int
    end: int
    """Exclusive; `start` and `end` count over all outputs of the rank."""
    whole_start: int
    whole: int
    """Number of rows, or features, of the whole, in which the range starts at `whole_start`."""


class FANShard(NamedTuple):
    """The rows of a FAN map that rank `rank` of `ranks` owns: [p | g] of each output, one output after the other."""

    ranks: int
    rank: int
    outputs: tuple[FANOutput, ...]
    """The rank's part of each output: P/T and G/T rows."""

    @classmethod
    def of_rank(cls, rank: int, ranks: int, whole: Sequence[FANOutput]) -> "FANShard":
        """Return a rank's part of whole outputs.

        Raises ValueError if the periodic or the linear rows of an output do not divide over the ranks.
        """
        for periodic, linear in whole:
            if periodic % ranks or linear % ranks:
                raise ValueError(
                    f"the FAN map's {periodic} periodic and {linear} linear rows do not divide over tensor parallel "
                    f"size {ranks}; choose a p_ratio for which both do"
                )
        return cls(ranks, rank, tuple(FANOutput(*(rows // ranks for rows in output)) for output in whole))

    @property
    def rows(self) -> list[int]:
        """Number of rows of each output on this rank."""
        return [output.rows for output in self.outputs]

    def whole(self, number: int) -> FANOutput:
        """Return the rows of output number `number` on all ranks together."""
        return FANOutput(*(self.ranks * rows for rows in self.outputs[number]))

    def row_ranges(self) -> list[RowRange]:
        """Return this rank's rows with their places in the whole map of each output."""
        return self._ranges(self.outputs)

    def feature_ranges(self) -> list[RowRange]:
        """Return the features that this rank computes from its rows, with their places in each whole output."""
        return self._ranges([(periodic, periodic, linear) for periodic, linear in self.outputs])

    def _ranges(self, outputs: Sequence[tuple[int, ...]]) -> list[RowRange]:
        """Return the range of each part of each output; `outputs` states the sizes of a rank's parts: (P / T, G / T).

        A whole output consists of the first parts of rank 0, rank 1, ..., then of their second parts, and so on.
        """
        ranges, start = [], 0
        for number, sizes in enumerate(outputs):
            part_start = 0  # where the parts of all ranks begin in the whole
            for size in sizes:
                whole_start = part_start + self.rank * size
                ranges.append(RowRange(number, start, start + size, whole_start, self.ranks * sum(sizes)))
                start += size
                part_start += self.ranks * size
        return [range_ for range_ in ranges if range_.end > range_.start]  # without p_ratio 0's empty ranges


# -- functions


class Exchanged(NamedTuple):
    """The output of a collective operation that may still be running."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Wait until the tensor is complete, and return it."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Activation(NamedTuple):
    """Computes, on each rank, the whole outputs [cos p, sin p, g] from all ranks' p | g, and the gradient of p | g."""

    shard: FANShard
    group: dist.ProcessGroup | None
    """The ranks that share the map."""
    gelu: bool
    """Whether g passes through a GELU."""
    recompute: bool = False
    """Whether backward recomputes the outputs from p | g, so that forward does not keep them."""

    def gather(self, pre_sbk: Tensor) -> Exchanged:
        """Start to gather the pre-activation [s, b, k] of all ranks into one tensor [t, s, b, k]."""
        if self.shard.ranks == 1:
            return Exchanged(pre_sbk.unsqueeze(0))
        gathered_tsbk = pre_sbk.new_empty(self.shard.ranks, *pre_sbk.shape)
        work = dist.all_gather_into_tensor(
            gathered_tsbk.flatten(0, 1), pre_sbk.contiguous(), group=self.group, async_op=True
        )
        return Exchanged(gathered_tsbk, work)

    def activate(self, pre_tsbk: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the outputs [s, b, w], and of each output g [n, v] if the gradient of a GELU needs g, else None."""
        pre_tnk = pre_tsbk.flatten(1, 2)
        activate = fan_activation.implementation_for(pre_tnk).activate  # writes an output in place, returns g
        outputs, kept_g = [], []
        for number, pre_tnr in enumerate(pre_tnk.split(self.shard.rows, dim=-1)):
            output = pre_tsbk.new_empty(*pre_tsbk.shape[1:3], self.shard.whole(number).width)
            kept_g.append(activate(pre_tnr, output.flatten(0, 1), self.shard.outputs[number].periodic, self.gelu))
            outputs.append(output)
        return outputs, kept_g

    def differentiate(
        self, outputs: Sequence[Tensor], kept_g: Sequence[Tensor | None], grads: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of p | g of all ranks, [t, s, b, k]: d p = d sin p * cos p - d cos p * sin p.

        `outputs` and `kept_g` are what `activate` returned. `grads` are this rank's terms of the gradients of the whole
        outputs [s, b, w], so the result, too, is this rank's term, which `reduce_scatter` sums over the ranks.
        """
        grad_pre_tsbk = grads[0].new_empty(self.shard.ranks, *grads[0].shape[:2], sum(self.shard.rows))
        implementation = fan_activation.implementation_for(grad_pre_tsbk)
        parts = grad_pre_tsbk.flatten(1, 2).split(self.shard.rows, dim=-1)  # [t, n, r] of each output, written below
        for output, grad, g_nv, part, sizes in zip(outputs, grads, kept_g, parts, self.shard.outputs, strict=True):
            implementation.differentiate(output.flatten(0, 1), grad.flatten(0, 1), g_nv, part, sizes.periodic)
        return grad_pre_tsbk

    def reduce_scatter(self, grad_pre_tsbk: Tensor) -> Exchanged:
        """Start to sum the gradient over the ranks; this rank receives the sum for its rows, [s, b, k]."""
        if self.shard.ranks == 1:
            return Exchanged(grad_pre_tsbk.squeeze(0))
        grad_pre_sbk = torch.empty_like(grad_pre_tsbk[0])
        work = dist.reduce_scatter_tensor(grad_pre_sbk, grad_pre_tsbk.flatten(0, 1), group=self.group, async_op=True)
        return Exchanged(grad_pre_sbk, work)


class FANActivation(torch.autograd.Function):
    """Computes the whole outputs [cos p, sin p, g] from the ranks' p | g; backward sums the gradient over the ranks.

    Backward takes cos p and sin p from the outputs, which the next layer keeps anyway. Only a GELU needs g kept.
    """

    @staticmethod
    def forward(ctx: Any, pre_sbk: Tensor, activation: Activation) -> tuple[Tensor, ...]:
        """Gather the pre-activation [s, b, k] of all ranks, and return the outputs [s, b, w]."""
        outputs, kept_g = activation.activate(activation.gather(pre_sbk).wait())
        ctx.save_for_backward(*outputs, *kept_g)
        ctx.activation = activation
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's p | g."""
        outputs, kept_g = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
        grad_pre_tsbk = ctx.activation.differentiate(outputs, kept_g, grads)
        return ctx.activation.reduce_scatter(grad_pre_tsbk).wait(), None


class FANActivationAndProduct(torch.autograd.Function):
    """`FANActivation`, and the product of its first output, X_F, with a weight.

    The two are one function because of the order in backward: the gradient of p | g needs only the product's input
    gradient, so the ranks sum the former while they compute the weight's gradient. If the outputs are recomputed, only
    this rank's p | g is kept; backward gathers all ranks' p | g again while it computes the product's input gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, pre_sbk: Tensor, weight_oh: Tensor, activation: Activation, fuses_accumulation: bool
    ) -> tuple[Tensor, ...]:
        """Return the product [s, b, o], and all outputs [s, b, w]; callers cannot differentiate X_F, the first one."""
        outputs, kept_g = activation.activate(activation.gather(pre_sbk).wait())
        kept = (pre_sbk,) if activation.recompute else (*outputs, *kept_g)
        ctx.save_for_backward(weight_oh, *kept)
        ctx.activation, ctx.fuses_accumulation = activation, fuses_accumulation
        ctx.mark_non_differentiable(outputs[0])
        ctx.set_materialize_grads(False)  # else backward would get zeros as large as X_F for its gradient
        return torch.matmul(outputs[0], weight_oh.t()), *outputs

    @staticmethod
    def backward(
        ctx: Any, grad_sbo: Tensor, _grad_x_f: None, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradients of this rank's p | g and of the weight; the loss must depend on every output but X_F."""
        activation: Activation = ctx.activation
        weight_oh, *kept = ctx.saved_tensors
        gathered = activation.gather(kept[0]) if activation.recompute else None  # then only p | g is kept
        grad_x_f = grad_sbo.matmul(weight_oh)
        if gathered is None:
            outputs, kept_g = kept[: 1 + len(grads)], kept[1 + len(grads) :]  # outputs: X_F, then one per gradient
        else:
            outputs, kept_g = activation.activate(gathered.wait())
        grad_pre = activation.reduce_scatter(activation.differentiate(outputs, kept_g, [grad_x_f, *grads]))
        del grad_x_f, gathered  # their memory is free while the weight's gradient is computed
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_no, x_nh = (x.contiguous().flatten(0, 1) for x in (grad_sbo, outputs[0]))
            grad_weight = weight_gradient(weight_oh, grad_no, x_nh, fuses_accumulation=ctx.fuses_accumulation)
        return grad_pre.wait(), grad_weight, None, None
