"""The autograd functions between a FAN map and the layer that reads X_F: gather, cos and sin, and back.

Before them, the rows of the map that one tensor parallel rank owns, and the places of rows and outputs in the whole.

Shapes: s sequence, b micro batch, n = s b tokens, t tensor parallel ranks (T of them), h hidden size, w an output's
width, P periodic and G linear rows of an output, v = G its linear rows, k the rows of one rank, of all outputs, r those
of one output, o the rows of one rank of the layer that reads X_F.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.model.local_layers import weight_gradient
from megatron_fanformer.ops import fan_activation

# -- rows


class FANOutput(NamedTuple):
    """The rows of one output of a FAN map."""

    periodic: int
    linear: int

    @classmethod
    def of_width(cls, width: int, p_ratio: float) -> "FANOutput":
        """Return the rows that make an output of that width."""
        periodic = int(p_ratio * width)
        return cls(periodic, width - 2 * periodic)

    @property
    def rows(self) -> int:
        """Rows of the map."""
        return self.periodic + self.linear

    @property
    def width(self) -> int:
        """Width of the map's output [cos p, sin p, g]."""
        return 2 * self.periodic + self.linear


class RowRange(NamedTuple):
    """A run of one rank's rows, and where it belongs in the canonical [p | g] map of its output.

    Or a run of their outputs, and its place in the canonical [cos p, sin p, g].
    """

    output: int
    start: int
    end: int
    canonical_start: int


class FANShard(NamedTuple):
    """The rows of the FAN map that one of `ranks` owns: those of each output, one output after the other."""

    ranks: int
    rank: int
    outputs: tuple[FANOutput, ...]
    """A rank's part of each output: P/T and G/T rows."""

    @classmethod
    def of_rank(cls, rank: int, ranks: int, whole: Sequence[FANOutput]) -> "FANShard":
        """Return a rank's part of whole outputs, whose rows must divide over the ranks."""
        for periodic, linear in whole:
            if periodic % ranks or linear % ranks:
                raise ValueError(
                    f"the FAN map's {periodic} periodic and {linear} linear rows do not divide over tensor parallel "
                    f"size {ranks}; choose a p_ratio for which both do"
                )
        return cls(ranks, rank, tuple(FANOutput(*(rows // ranks for rows in output)) for output in whole))

    @property
    def rows(self) -> list[int]:
        """Rows of each output in turn, as they lie in a rank's pre-activation."""
        return [output.rows for output in self.outputs]

    def whole(self, output: int) -> FANOutput:
        """Return the rows of an output on all ranks."""
        return FANOutput(*(self.ranks * rows for rows in self.outputs[output]))

    def row_ranges(self) -> list[RowRange]:
        """Return where this rank's rows belong in the canonical maps."""
        ranges, start = [], 0
        for number, (periodic, linear) in enumerate(self.outputs):
            linear_start = self.ranks * periodic + self.rank * linear
            middle, end = start + periodic, start + periodic + linear
            ranges.append(RowRange(number, start, middle, self.rank * periodic))
            ranges.append(RowRange(number, middle, end, linear_start))
            start = end
        return [range_ for range_ in ranges if range_.end > range_.start]

    def feature_ranges(self) -> list[RowRange]:
        """Return the places of this rank's own outputs in the canonical [cos p, sin p, g]."""
        ranges, start = [], 0
        for number, (periodic, linear) in enumerate(self.outputs):
            whole = self.ranks * periodic
            first, last = self.rank * periodic, 2 * whole + self.rank * linear
            for size, canonical_start in ((periodic, first), (periodic, whole + first), (linear, last)):
                ranges.append(RowRange(number, start, start + size, canonical_start))
                start += size
        return [range_ for range_ in ranges if range_.end > range_.start]


# -- functions


class Exchanged(NamedTuple):
    """The output of a collective that may still be running."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return the tensor, once it is written."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Activation(NamedTuple):
    """Computes [cos p, sin p, g] of each output, whole on each rank, from all ranks' p | g; and gradients back."""

    shard: FANShard
    group: dist.ProcessGroup | None
    """The ranks that share the map."""
    gelu: bool
    recompute: bool = False
    """True if backward recomputes the outputs from p | g, so that they are not kept for it."""

    def gather(self, pre_sbk: Tensor) -> Exchanged:
        """Start to gather the pre-activation of all ranks, [t, s, b, k]."""
        if self.shard.ranks == 1:
            return Exchanged(pre_sbk.unsqueeze(0))
        gathered_tsbk = pre_sbk.new_empty(self.shard.ranks, *pre_sbk.shape)
        work = dist.all_gather_into_tensor(
            gathered_tsbk.flatten(0, 1), pre_sbk.contiguous(), group=self.group, async_op=True
        )
        return Exchanged(gathered_tsbk, work)

    def activate(self, pre_tsbk: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Each output [s, b, w], and, where a GELU follows, g [n, v] for its gradient."""
        pre_tnk = pre_tsbk.flatten(1, 2)
        form = fan_activation.implementation_for(pre_tnk)
        made, kept_g = [], []
        for number, pre_tnr in enumerate(pre_tnk.split(self.shard.rows, dim=-1)):
            x_f = pre_tsbk.new_empty(*pre_tsbk.shape[1:3], self.shard.whole(number).width)
            kept_g.append(form.activate(pre_tnr, x_f.flatten(0, 1), self.shard.outputs[number].periodic, self.gelu))
            made.append(x_f)
        return made, kept_g

    def differentiate(self, made: Sequence[Tensor], kept_g: Sequence[Tensor | None], grads: Sequence[Tensor]) -> Tensor:
        """d p = d sin p * cos p - d cos p * sin p, from this rank's part of the outputs' gradients: [t, s, b, k]."""
        grad_pre_tsbk = grads[0].new_empty(self.shard.ranks, *grads[0].shape[:2], sum(self.shard.rows))
        form = fan_activation.implementation_for(grad_pre_tsbk)
        parts = grad_pre_tsbk.flatten(1, 2).split(self.shard.rows, dim=-1)
        for x_f, grad, g_nv, part, rows in zip(made, grads, kept_g, parts, self.shard.outputs, strict=True):
            form.differentiate(x_f.flatten(0, 1), grad.flatten(0, 1), g_nv, part, rows.periodic)
        return grad_pre_tsbk

    def reduce_scatter(self, grad_pre_tsbk: Tensor) -> Exchanged:
        """Start to sum the gradient over the ranks; each keeps that of its rows, [s, b, k]."""
        if self.shard.ranks == 1:
            return Exchanged(grad_pre_tsbk.squeeze(0))
        grad_pre_sbk = torch.empty_like(grad_pre_tsbk[0])
        work = dist.reduce_scatter_tensor(grad_pre_sbk, grad_pre_tsbk.flatten(0, 1), group=self.group, async_op=True)
        return Exchanged(grad_pre_sbk, work)


class FANActivation(torch.autograd.Function):
    """p | g of every rank -> [cos p, sin p, g] of each output, whole on each rank; the gradient is summed once.

    Backward takes cos p and sin p from the output, which the map after it keeps anyway; nothing else is saved, except
    g where an activation follows it.
    """

    @staticmethod
    def forward(ctx: Any, pre_sbk: Tensor, activation: Activation) -> tuple[Tensor, ...]:
        """Gathers the pre-activation [s, b, k] of all ranks and returns each output [s, b, w]."""
        made, kept_g = activation.activate(activation.gather(pre_sbk).wait())
        ctx.save_for_backward(*made, *kept_g)
        ctx.activation = activation
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's p | g."""
        made, kept_g = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
        grad_pre_tsbk = ctx.activation.differentiate(made, kept_g, grads)
        return ctx.activation.reduce_scatter(grad_pre_tsbk).wait(), None


class FANActivationAndProduct(torch.autograd.Function):
    """`FANActivation`, and the first output's product with a weight.

    They are one function because of the order in backward: the gradient of p | g needs only the product's input
    gradient, so that its sum over the ranks runs while the weight's gradient is computed. Where the outputs are
    recomputed, only this rank's p | g are kept, which are gathered again during the product's input gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, pre_sbk: Tensor, weight_oh: Tensor, activation: Activation, fuses_accumulation: bool
    ) -> tuple[Tensor, ...]:
        """[s, b, k], [o, h] -> the product [s, b, o], X_F [s, b, h] without a gradient, the other outputs [s, b, w]."""
        made, kept_g = activation.activate(activation.gather(pre_sbk).wait())
        ctx.save_for_backward(weight_oh, *((pre_sbk,) if activation.recompute else (*made, *kept_g)))
        ctx.activation, ctx.fuses_accumulation = activation, fuses_accumulation
        ctx.mark_non_differentiable(made[0])
        ctx.set_materialize_grads(False)  # X_F's would be zeros, as large as itself
        return torch.matmul(made[0], weight_oh.t()), *made

    @staticmethod
    def backward(
        ctx: Any, grad_sbo: Tensor, _grad_x_f: None, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradients of this rank's p | g, and of its weight; every output must have been used."""
        activation: Activation = ctx.activation
        outputs = 1 + len(grads)
        weight_oh, *kept = ctx.saved_tensors
        made, kept_g = kept[:outputs], kept[outputs:]
        gathered = activation.gather(kept[0]) if activation.recompute else None
        grad_x_f = grad_sbo.matmul(weight_oh)
        if gathered is not None:
            made, kept_g = activation.activate(gathered.wait())
        grad_pre = activation.reduce_scatter(activation.differentiate(made, kept_g, [grad_x_f, *grads]))
        del grad_x_f, gathered  # not needed beside the weight's gradient
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_no, x_nh = (x.contiguous().flatten(0, 1) for x in (grad_sbo, made[0]))
            grad_weight = weight_gradient(weight_oh, grad_no, x_nh, fuses_accumulation=ctx.fuses_accumulation)
        return grad_pre.wait(), grad_weight, None, None
