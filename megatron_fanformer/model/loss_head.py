"""The loss head: logits, cross entropy and their gradients, for a chunk of tokens at a time.

megatron-core's head keeps the logits of all tokens of a micro batch from forward to backward, in float32. Here forward
computes the logits of one chunk, turns them in place into their own gradient, and multiplies this into the gradients of
the hidden states and of the weight. So there is no fourth matrix product, and never more than a chunk's logits.

Forward can take the gradient because the loss mask says how tokens will be weighted. Backward compares the mask with
the gradient that it receives: it raises if losses were weighted in another way, for that would train something else.

Shapes: s sequence, b micro batch, h hidden size, n = s b tokens, c tokens of a chunk, v columns of logits on this
tensor parallel rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor

from megatron_fanformer.model.local_layers import stand_in
from megatron_fanformer.ops.cross_entropy import write_loss_gradient
from megatron_fanformer.ops.matrices import add_product

SAME_WEIGHTS = 1e-6
"""Relative tolerance between a gradient and a multiple of the loss mask: the rounding of a float32 product."""


class LossHead(ColumnParallelLinear):
    """megatron-core's output layer: returns logits, or within `scoring` the losses of labels."""

    chunk_tokens: int
    z_loss_coefficient: float
    _z_losses: Tensor | None = None
    _scored: dict[str, Any] | None = None
    """Within `scoring`: the arguments of `losses`."""

    @classmethod
    def take_over(cls, output_layer: ColumnParallelLinear, chunk_tokens: int, z_loss_coefficient: float = 0.0) -> None:
        """Make a LossHead of an output layer that megatron-core has built, unless the layer is of a subclass (for FP8).

        Args:
            chunk_tokens: number of tokens in a chunk.
            z_loss_coefficient: factor of the term (log Z)² in the loss of each token that is differentiated; Z is the
                sum of the exponentials of the token's logits.
        """
        if type(output_layer) is ColumnParallelLinear:
            output_layer.__class__ = cls
            output_layer.chunk_tokens = chunk_tokens
            output_layer.z_loss_coefficient = z_loss_coefficient

    def take_z_losses(self) -> Tensor | None:
        """Return the masked sum of z-losses since the last call, float64 on the device, or None if there were none."""
        z_losses, self._z_losses = self._z_losses, None
        return z_losses

    def note_z_losses(self, log_sum_c: Tensor, mask_c: Tensor) -> None:
        """Add a chunk's z-losses to the sum that `take_z_losses` returns."""
        if self.z_loss_coefficient:
            sum_of_squares = (log_sum_c.double().square() * mask_c).sum()
            before = 0.0 if self._z_losses is None else self._z_losses
            self._z_losses = before + self.z_loss_coefficient * sum_of_squares

    @contextmanager
    def scoring(self, labels_sb: Tensor, loss_mask_sb: Tensor | None, *, columns: int | None) -> Iterator[None]:
        """Make `forward` return the losses of these labels in place of logits; see `losses` for the arguments."""
        self._scored = {"labels_sb": labels_sb, "loss_mask_sb": loss_mask_sb, "columns": columns}
        try:
            yield
        finally:
            self._scored = None

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """Return logits [s, b, v], or within `scoring` losses [s, b]; the None says that no bias is left to add.

        Args:
            input_: hidden states [s, b, h]; under sequence parallelism this rank's part of s.
            weight: [v, h], if it is tied to the embedding.
        """
        if self._scored is None:
            return super().forward(input_, weight, runtime_gather_output)
        return self.losses(input_, weight, **self._scored), None

    def losses(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        *,
        labels_sb: Tensor,
        loss_mask_sb: Tensor | None = None,
        columns: int | None = None,
    ) -> Tensor:
        """Return the losses [s, b] of labels in float32; their sum, weighted by the loss mask, can be differentiated.

        Backward raises RuntimeError if the weights in the sum are not proportional to the loss mask, or if they are not
        equal to it and the gradient of `weight` is in `main_grad` already.

        Args:
            input_, weight: as in `forward`.
            loss_mask_sb: the weights of the losses in the sum; None: ones. Without gradients, losses of weight 0 are
                not computed, and returned as 0.
            columns: how many of this rank's columns stand for tokens; the padding behind them gets a probability of 0.
                None: all.
        """
        weight = self.weight if weight is None else weight
        mask_sb = torch.ones_like(labels_sb, dtype=torch.float32) if loss_mask_sb is None else loss_mask_sb.float()
        is_differentiated = torch.is_grad_enabled() and (input_.requires_grad or weight.requires_grad)
        losses: Tensor = _LossHeadFunction.apply(input_, weight, labels_sb, mask_sb, self, is_differentiated, columns)
        return losses


def rule_out_padding(logits: Tensor, columns: int | None) -> None:
    """Give all but the first `columns` of logits [..., v] a probability of 0, in place; None changes nothing.

    They become the lowest number, not -inf: a rank may have padding alone, and -inf minus a maximum of -inf is NaN.
    """
    if columns is not None:
        logits[..., columns:] = torch.finfo(logits.dtype).min


class _LossHeadFunction(torch.autograd.Function):
    """Computes the losses of all tokens, and in forward already the gradient of their masked sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x_sbh: Tensor,
        weight_vh: Tensor,
        labels_sb: Tensor,
        mask_sb: Tensor,
        head: LossHead,
        is_differentiated: bool,
        columns: int | None,
    ) -> Tensor:
        """Return the losses [s, b] of the labels, in float32; keep the gradients if `is_differentiated`."""
        gradients = _Gradients(x_sbh, weight_vh, head) if is_differentiated else None
        if head.sequence_parallel:
            x_sbh = gather_from_sequence_parallel_region(x_sbh, group=head.tp_group)
        x_nh = x_sbh.flatten(0, 1)
        labels_n, mask_n = labels_sb.reshape(-1), mask_sb.reshape(-1)
        kept_n = None if is_differentiated else mask_n.nonzero().squeeze(1)  # tokens whose weight is not 0; None: all
        if kept_n is not None:
            x_nh, labels_n, mask_n = x_nh[kept_n], labels_n[kept_n], mask_n[kept_n]
        losses_n = torch.empty(len(x_nh), dtype=torch.float32, device=x_nh.device)
        tensors_n = (x_nh, labels_n, mask_n, losses_n)  # if empty: no chunks (`split` would make one empty chunk)
        first_row = head.tp_group.rank() * head.output_size_per_partition
        buffer_cv = x_nh.new_empty((min(head.chunk_tokens, len(x_nh)), len(weight_vh)))
        chunks = zip(*(t.split(head.chunk_tokens) for t in tensors_n), strict=True) if len(x_nh) else ()
        for x_ch, labels_c, mask_c, losses_c in chunks:
            logits_cv = torch.mm(x_ch, weight_vh.t(), out=buffer_cv[: len(x_ch)])
            rule_out_padding(logits_cv, columns)
            local_labels_c = labels_c - first_row  # labels of other ranks' columns lie outside [0, v)
            factors = write_loss_gradient(
                logits_cv, local_labels_c, losses_c, head.tp_group, is_differentiated, head.z_loss_coefficient
            )
            if gradients is not None:
                gradients.add(logits_cv, x_ch, factors.gradient * mask_c)
                head.note_z_losses(factors.log_sum, mask_c)
        if gradients is not None:
            ctx.gradients = gradients
            ctx.save_for_backward(mask_sb)
        if kept_n is not None:
            kept_losses, losses_n = losses_n, losses_n.new_zeros(labels_sb.numel())
            losses_n[kept_n] = kept_losses
        return losses_n.view_as(labels_sb)

    @staticmethod
    def backward(ctx: Any, grad_sb: Tensor) -> Any:
        """Return the gradients that forward computed, scaled to the gradient of the losses; raises if called twice."""
        (mask_sb,) = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss head's gradient was taken already; run forward again")
        scale = None if gradients.is_in_main_grad else _scale_of(grad_sb, mask_sb)  # a sum in main_grad stays as it is
        if scale is None:
            torch._assert_async(
                (grad_sb == mask_sb).all(),
                "the losses were not summed with the loss mask that the model was given, and the gradient of that sum "
                "is in main_grad already; pass the weights to the model as loss_mask, or set "
                "kernels.chunked_loss_head to false",
            )
        return *gradients.scaled(scale), None, None, None, None, None


def _scale_of(grad_sb: Tensor, mask_sb: Tensor) -> Tensor:
    """Return the factor between the loss mask and the gradient of the losses.

    Raises RuntimeError if there is no such factor; on a GPU, which is not waited for, at the next synchronization.
    """
    grad, mask = grad_sb.double(), mask_sb.double()
    scale = (grad * mask).sum() / (mask * mask).sum().clamp_min(torch.finfo(torch.float32).tiny)  # by least squares
    difference = (grad - scale * mask).abs().max()
    torch._assert_async(
        difference <= SAME_WEIGHTS * (scale * mask).abs().max(),
        "the losses were weighted in another proportion than the loss mask that the model was given, and the gradient "
        "follows that mask; pass the weights to the model as loss_mask, or set kernels.chunked_loss_head to false",
    )
    return scale.float()


class _Gradients:
    """Accumulates, chunk by chunk, the gradients of the masked sum of losses for the hidden states and the weight."""

    def __init__(self, x_sbh: Tensor, weight_vh: Any, head: LossHead) -> None:
        self.weight, self.head, self.shape = weight_vh, head, x_sbh.shape
        tokens = x_sbh.shape[0] * x_sbh.shape[1] * (head.tp_group.size() if head.sequence_parallel else 1)
        self.x_grad_nh = torch.empty((tokens, x_sbh.shape[2]), dtype=x_sbh.dtype, device=x_sbh.device)
        self.is_in_main_grad = weight_vh.requires_grad and hasattr(weight_vh, "main_grad")
        self.weight_grad_vh: Tensor | None = None
        if self.is_in_main_grad:
            self.weight_grad_vh = weight_vh.main_grad
        elif weight_vh.requires_grad:
            self.weight_grad_vh = torch.zeros_like(weight_vh, dtype=torch.float32)
        self._num_added = 0
        self._reduction: Any = None
        self._unreduced: Tensor | None = None

    def add(self, dlogits_cv: Tensor, x_ch: Tensor, factor_c: Tensor) -> None:
        """Add the next chunk: the gradient of its logits is `dlogits_cv` times `factor_c`."""
        begin, self._num_added = self._num_added, self._num_added + len(x_ch)
        torch.mm(dlogits_cv, self.weight, out=self.x_grad_nh[begin : self._num_added]).mul_(factor_c.unsqueeze(-1))
        if self._num_added == len(self.x_grad_nh):
            self._start_reduction()  # runs while the weight's gradient is computed
        if self.weight_grad_vh is not None:
            add_product(self.weight_grad_vh, dlogits_cv, (x_ch * factor_c.unsqueeze(-1)).to(x_ch.dtype))

    def _start_reduction(self) -> None:
        """Start to sum the hidden states' gradient over the ranks; under sequence parallelism keep this rank's part."""
        group = self.head.tp_group
        if group.size() == 1:
            return
        if not self.head.sequence_parallel:
            self._reduction = dist.all_reduce(self.x_grad_nh, group=group, async_op=True)
            return
        self._unreduced = self.x_grad_nh  # alive until the reduction is complete, if the backend keeps no reference
        self.x_grad_nh = self.x_grad_nh.new_empty((len(self.x_grad_nh) // group.size(), self.x_grad_nh.shape[1]))
        self._reduction = dist.reduce_scatter_tensor(self.x_grad_nh, self._unreduced, group=group, async_op=True)

    def scaled(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the hidden states and of the weight, multiplied by `scale` unless it is None."""
        if self._reduction is not None:
            self._reduction.wait()
            self._unreduced = None
        x_grad_sbh = self.x_grad_nh.view(self.shape)
        if scale is not None:
            x_grad_sbh.mul_(scale)
        if self.is_in_main_grad:  # the weight's gradient is there already, and cannot be scaled: `scale` is None
            return x_grad_sbh, stand_in(self.weight)
        if self.weight_grad_vh is not None and scale is not None:
            self.weight_grad_vh.mul_(scale)
        return x_grad_sbh, self.weight_grad_vh
