"""Cross entropy of a chunk of tokens: computes the losses, and overwrites the logits with their gradient.

Shapes: c tokens of the chunk, v this tensor parallel rank's rows of the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.ops.triton_support import has_triton, triton_takes

CACHED_BYTES_PER_THREAD = 2**20
"""Bytes of float32 logits that a CPU thread takes through all elementwise passes at once: they stay in its L2 cache.
Measured on a core with 1 MiB of L2: 29 ms for 512 x 50304 logits, 45 ms if each pass runs over all logits."""
CACHED_BYTES_GPU = 2**25
"""Bytes at once on a GPU without the kernel: a Hopper's L2 cache has 50 MiB."""
SMALLEST_SHARE = 2.0**-64
"""Lower bound of a token's factor: a smaller factor changes no float32 gradient, and its reciprocal may be infinite."""
SMALLEST_SCALE = 2.0**-20
"""Lower bound of the magnitude of a z-loss's factor, for the same reasons."""


class ChunkFactors(NamedTuple):
    """Two numbers for each token of a chunk, [c] in float32."""

    gradient: Tensor
    """The factor by which the caller must multiply the gradient of the token's logits."""
    log_sum: Tensor
    """log Z: the logarithm of the sum of the exponentials of the token's logits."""


def write_loss_gradient(
    logits_cv: Tensor,
    local_labels_c: Tensor,
    losses_c: Tensor,
    group: dist.ProcessGroup,
    is_differentiated: bool,
    z_loss_coefficient: float = 0.0,
) -> ChunkFactors:
    """Write the losses, and overwrite the logits with their gradient up to a factor for each token.

    The factors are returned, and not applied, because it is cheaper to multiply matrices narrower than the vocabulary.

    With a z-loss, the gradient is that of loss + z_loss_coefficient · (log Z)². In the gradient of a logit the second
    term multiplies the logit's probability by 1 + 2 · z_loss_coefficient · log Z. The losses stay cross entropies.

    Args:
        logits_cv: this rank's logits, contiguous; without `is_differentiated` they are overwritten by intermediates.
        local_labels_c: the labels less the rank's first row: those of other ranks lie outside [0, v).
        losses_c: the losses to write, in float32.
        group: the ranks that share the vocabulary.
    """
    rows = torch.arange(len(local_labels_c), device=local_labels_c.device)
    is_local = (local_labels_c >= 0) & (local_labels_c < logits_cv.shape[1])
    columns = local_labels_c.where(is_local, 0)
    label_logit_c = logits_cv[rows, columns].float()
    local_greatest_c, sum_c = exponentials(logits_cv)
    (total_c, label_c), factor_c, greatest_c = _combine_ranks(local_greatest_c, sum_c, label_logit_c, is_local, group)
    log_total_c = total_c.log()
    torch.sub(log_total_c, label_c, out=losses_c)  # both are relative to the largest logit
    divisor_c = sum_c if logits_cv.dtype != torch.float32 else 1.0  # what `exponentials` has divided by
    share_c = (divisor_c * factor_c / total_c).clamp_min(SMALLEST_SHARE)  # share_c * logits_cv: probabilities
    log_sum_c = log_total_c + greatest_c
    if is_differentiated:
        probability_c = label_c.exp() / total_c
        if z_loss_coefficient:
            scale_c = 1 + 2 * z_loss_coefficient * log_sum_c
            scale_c = scale_c.where(scale_c.abs() >= SMALLEST_SCALE, SMALLEST_SCALE)
            probability_c, share_c = probability_c * scale_c, share_c * scale_c
        label_grad_c = (probability_c - 1) / share_c  # rounded once, in the next line; the caller multiplies by share_c
        logits_cv[rows, columns] = label_grad_c.to(logits_cv.dtype).where(is_local, logits_cv[rows, columns])
    return ChunkFactors(share_c, log_sum_c)


def _combine_ranks(
    greatest_c: Tensor, sum_c: Tensor, label_logit_c: Tensor, is_local: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' parts of the vocabulary.

    Returns:
        The sum of exp(logit - largest logit) and the label's logit less the largest, [2, c]; this rank's
        exp(local largest - largest), [c]; the largest logit of the whole vocabulary, [c].
    """
    if group.size() == 1:
        return torch.stack([sum_c, label_logit_c - greatest_c]), torch.ones_like(sum_c), greatest_c
    whole_greatest_c = greatest_c.clone()
    dist.all_reduce(whole_greatest_c, op=dist.ReduceOp.MAX, group=group)
    factor_c = (greatest_c - whole_greatest_c).exp()
    both = torch.stack([sum_c * factor_c, (label_logit_c - whole_greatest_c).where(is_local, 0)])  # 0: on others
    dist.all_reduce(both, group=group)
    return both, factor_c, whole_greatest_c


def exponentials(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each logit by exp(logit - largest logit of the row); 16-bit results are divided by their row's sum.

    The division spares bf16 a second rounding: without tensor parallelism a token's factor is then 1. If nothing was
    divided, bf16 gradients at initial weights were 1.4 to 1.7 times as far from float32 as those of a plain softmax.

    A kernel (`cross_entropy_triton`, `cpu_kernels`) does the work if one can take the logits, else PyTorch.

    Returns:
        The largest logit and the undivided sum of each row, [c] in float32.
    """
    if cpu_kernels.can_take(logits_cv):
        return cpu_kernels.softmax(logits_cv)
    kernel = _triton_kernel() if triton_takes(logits_cv) else None
    return exponentials_in_torch(logits_cv) if kernel is None else kernel(logits_cv)


def _triton_kernel() -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    if not has_triton(warning_start="the loss head's exponentials run"):
        return None
    from megatron_fanformer.ops import cross_entropy_triton

    return cross_entropy_triton.exponentials


def exponentials_in_torch(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `exponentials` in PyTorch on any device; a few rows at a time go through all passes."""
    is_on_cpu = logits_cv.device.type == "cpu"
    cached_bytes = CACHED_BYTES_PER_THREAD * torch.get_num_threads() if is_on_cpu else CACHED_BYTES_GPU
    greatest, sums = [], []
    for logits in logits_cv.split(max(1, cached_bytes // (4 * logits_cv.shape[1]))):  # 4: bytes of float32
        values = logits.float()  # float32 logits are not copied
        row_greatest = values.amax(-1, keepdim=True)
        row_sum = values.sub_(row_greatest).exp_().sum(-1, keepdim=True)
        if values is not logits:  # 16-bit logits: values are written back, divided as `exponentials` says
            logits.copy_(values.div_(row_sum))
        sums.append(row_sum.squeeze(-1))
        greatest.append(row_greatest.squeeze(-1))
    return torch.cat(greatest), torch.cat(sums)
