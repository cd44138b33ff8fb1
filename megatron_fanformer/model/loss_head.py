"""The loss head: logits, cross entropy and the gradient of both, for some tokens at a time.

megatron-core's head keeps the logits of all tokens of a micro batch from forward to backward, in float32. Here a chunk
of tokens is carried through: its logits are made, turned into their own gradient in place, and multiplied into
the gradients of the hidden states and of the weight, in forward already. So there is no fourth matrix product, and
never more than a chunk's logits.

A gradient that is taken in forward must know how tokens will be weighted: by the loss mask. Backward checks the
gradient that it receives against it, so that losses weighted in another way raise instead of training something else.

Shapes: s sequence, b micro batch, h hidden size, n = s b tokens, c tokens of a chunk, v this tensor parallel rank's
rows of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_fanformer.model.local_layers import stand_in
from megatron_fanformer.ops.cross_entropy import to_gradient
from megatron_fanformer.ops.matrices import add_product

SAME_WEIGHTS = 1e-6
"""Relative tolerance: a loss mask's multiple has one factor up to the rounding of a float32 product."""


class LossHead(ColumnParallelLinear):
    """megatron-core's output layer, which gives logits, or the losses of given labels."""

    chunk_tokens: int
    z_loss_coefficient: float
    _z_losses: Tensor | None = None
    _scored: dict[str, Any] | None = None

    @classmethod
    def take_over(cls, output_layer: ColumnParallelLinear, chunk_tokens: int, z_loss_coefficient: float = 0.0) -> None:
        """Turn a plain output layer, whose class megatron-core's model fixes, into one of these.

        Args:
            chunk_tokens: how many tokens' logits there are at a time.
            z_loss_coefficient: of (log Z)² of each token, added to the differentiated loss; Z is the sum of the
                exponentials of its logits.
        """
        if type(output_layer) is ColumnParallelLinear:  # another one, of FP8, stays as it is
            output_layer.__class__ = cls
            output_layer.chunk_tokens = chunk_tokens
            output_layer.z_loss_coefficient = z_loss_coefficient

    def take_z_losses(self) -> Tensor | None:
        """Return the masked sum of z-losses since the last call, a float64 on the device; None without any."""
        taken, self._z_losses = self._z_losses, None
        return taken

    def note_z_losses(self, log_sum_c: Tensor, mask_c: Tensor) -> None:
        """Add a chunk's z-losses to that sum."""
        if self.z_loss_coefficient:
            sum_of_squares = (log_sum_c.double().square() * mask_c).sum()
            before = 0.0 if self._z_losses is None else self._z_losses
            self._z_losses = before + self.z_loss_coefficient * sum_of_squares

    @contextmanager
    def scoring(self, labels_sb: Tensor, loss_mask_sb: Tensor | None, *, columns: int | None) -> Iterator[None]:
        """Make `forward` give the losses of these labels, where megatron-core's model expects logits."""
        self._scored = {"labels_sb": labels_sb, "loss_mask_sb": loss_mask_sb, "columns": columns}
        try:
            yield
        finally:
            self._scored = None

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """Return logits [s, b, v] and no bias, as its base class returns them, or within `scoring` losses [s, b].

        Args:
            input_: hidden states [s, b, h]; under sequence parallelism this rank's part of s.
            weight: [v, h], if it is the embedding's.
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
        """Return the losses [s, b] of labels, in float32.

        Args:
            input_, weight: as of `forward`.
            loss_mask_sb: the weights by which losses will be summed; None: ones. Without gradients, those
                that it multiplies by 0 are 0, and not computed. The gradient is that of the sum. Backward raises a
                RuntimeError where the losses were weighted in another proportion, and, where the weight has a
                `main_grad` and so has its gradient already, in another scale.
            columns: how many of this rank's v have a probability, its first ones; None: all.
        """
        weight = self.weight if weight is None else weight
        mask_sb = torch.ones_like(labels_sb, dtype=torch.float32) if loss_mask_sb is None else loss_mask_sb.float()
        is_differentiated = torch.is_grad_enabled() and (input_.requires_grad or weight.requires_grad)
        losses_sb: Tensor = _LossHeadFunction.apply(
            input_, weight, labels_sb, mask_sb, self, is_differentiated, columns
        )
        return losses_sb


def rule_out_padding(logits: Tensor, columns: int | None) -> None:
    """Give all but the first `columns` of [..., v] logits a probability of 0, in place; None: they keep theirs.

    By the lowest number, not by -inf: a rank may have no other columns, and their largest one is subtracted.
    """
    if columns is not None:
        logits[..., columns:] = torch.finfo(logits.dtype).min


class _LossHeadFunction(torch.autograd.Function):
    """The losses of all tokens, with the gradient of their masked sum."""

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
        """[s, b, h], [v, h] -> the losses [s, b] of the labels, in float32; takes their gradient along."""
        gradients = _Gradients(x_sbh, weight_vh, head) if is_differentiated else None
        x_nh = _whole_sequence(x_sbh, head).flatten(0, 1)
        labels_n, mask_n = labels_sb.reshape(-1), mask_sb.reshape(-1)
        kept_n = None if is_differentiated else mask_n.nonzero().squeeze(1)  # a question is scored by its answer alone
        if kept_n is not None:
            x_nh, labels_n, mask_n = x_nh[kept_n], labels_n[kept_n], mask_n[kept_n]
        losses_n = torch.empty(len(x_nh), dtype=torch.float32, device=x_nh.device)
        tensors_n = (x_nh, labels_n, mask_n, losses_n)
        first_row = head.tp_group.rank() * head.output_size_per_partition
        buffer_cv = x_nh.new_empty((min(head.chunk_tokens, len(x_nh)), len(weight_vh)))
        chunks = zip(*(t.split(head.chunk_tokens) for t in tensors_n), strict=True) if len(x_nh) else ()
        for x_ch, labels_c, mask_c, losses_c in chunks:
            logits_cv = torch.mm(x_ch, weight_vh.t(), out=buffer_cv[: len(x_ch)])
            rule_out_padding(logits_cv, columns)
            own_labels_c, z_loss = labels_c - first_row, head.z_loss_coefficient
            factors = to_gradient(logits_cv, own_labels_c, losses_c, head.tp_group, is_differentiated, z_loss)
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
        """Return the gradients that forward took, scaled; they are given once."""
        (mask_sb,) = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss head's gradient was taken already; run forward again")
        scale = None if gradients.is_in_main_grad else _scale_of(grad_sb, mask_sb)
        if scale is None:
            _require(
                (grad_sb == mask_sb).all(),
                "the losses were not summed with the loss mask that the model was given, and the gradient of that sum "
                "is in main_grad already; pass the weights to the model as loss_mask, or set "
                "kernels.chunked_loss_head to false",
            )
        return *gradients.scaled(scale), None, None, None, None, None


def _require(condition: Tensor, message: str) -> None:
    """Raise a RuntimeError unless it holds; a GPU is not waited for, and fails at its next synchronisation."""
    torch._assert_async(condition, message)


def _scale_of(grad_sb: Tensor, mask_sb: Tensor) -> Tensor:
    """Return the factor between the loss mask and upstream gradients."""
    grad, mask = grad_sb.double(), mask_sb.double()
    scale = (grad * mask).sum() / (mask * mask).sum().clamp_min(torch.finfo(torch.float32).tiny)
    difference = (grad - scale * mask).abs().max()
    _require(
        difference <= SAME_WEIGHTS * (scale * mask).abs().max(),
        "the losses were weighted in another proportion than the loss mask that the model was given, and the gradient "
        "is of that; pass the weights to the model as loss_mask, or set kernels.chunked_loss_head to false",
    )
    return scale.float()


def _whole_sequence(x_sbh: Tensor, head: LossHead) -> Tensor:
    if not head.sequence_parallel:
        return x_sbh
    ranks = head.tp_group.size()
    whole = torch.empty((x_sbh.shape[0] * ranks, *x_sbh.shape[1:]), dtype=x_sbh.dtype, device=x_sbh.device)
    dist.all_gather_into_tensor(whole, x_sbh.contiguous(), group=head.tp_group)
    return whole


# -- gradients of the hidden states and of the weight


class _Gradients:
    """Gradients of the masked sum of losses with respect to the hidden states and the weight, chunk by chunk."""

    def __init__(self, x_sbh: Tensor, weight_vh: Any, head: LossHead) -> None:
        self.weight, self.head = weight_vh, head
        self.shape = x_sbh.shape
        tokens = x_sbh.shape[0] * x_sbh.shape[1] * (head.tp_group.size() if head.sequence_parallel else 1)
        self.x_nh = torch.empty((tokens, x_sbh.shape[2]), dtype=x_sbh.dtype, device=x_sbh.device)
        self.is_in_main_grad = weight_vh.requires_grad and hasattr(weight_vh, "main_grad")
        self.sum_vh: Tensor | None = None
        if self.is_in_main_grad:
            self.sum_vh = weight_vh.main_grad
        elif weight_vh.requires_grad:
            self.sum_vh = torch.zeros_like(weight_vh, dtype=torch.float32)
        self._done_tokens = 0
        self._reduction: Any = None
        self._is_read: Tensor | None = None

    def add(self, dlogits_cv: Tensor, x_ch: Tensor, factor_c: Tensor) -> None:
        """Add the next chunk's; the gradient of its logits is `dlogits_cv` times `factor_c`."""
        begin, self._done_tokens = self._done_tokens, self._done_tokens + len(x_ch)
        torch.mm(dlogits_cv, self.weight, out=self.x_nh[begin : self._done_tokens]).mul_(factor_c.unsqueeze(-1))
        if self._done_tokens == len(self.x_nh):
            self._reduce()  # while the last of the weight's gradient is made
        if self.sum_vh is not None:
            add_product(self.sum_vh, dlogits_cv, (x_ch * factor_c.unsqueeze(-1)).to(x_ch.dtype))

    def _reduce(self) -> None:
        """Sum over the ranks' parts of the vocabulary; under sequence parallelism keep this rank's part."""
        group = self.head.tp_group
        if group.size() == 1:
            return
        if not self.head.sequence_parallel:
            self._reduction = dist.all_reduce(self.x_nh, group=group, async_op=True)
            return
        whole, self.x_nh = self.x_nh, self.x_nh.new_empty((len(self.x_nh) // group.size(), self.x_nh.shape[1]))
        self._is_read = whole  # until it is waited for, whether or not the backend holds on to it
        self._reduction = dist.reduce_scatter_tensor(self.x_nh, whole, group=group, async_op=True)

    def scaled(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the hidden states and the weight, times `scale`."""
        if self._reduction is not None:
            self._reduction.wait()
            self._is_read = None
        x_sbh = self.x_nh.view(self.shape)
        if scale is not None:
            x_sbh.mul_(scale)
        if not self.is_in_main_grad:
            return x_sbh, self.sum_vh if self.sum_vh is None or scale is None else self.sum_vh.mul_(scale)
        return x_sbh, stand_in(self.weight)
