"""Cross entropy of a chunk of tokens: from logits to losses, the logits turned into their own gradient in place.

Shapes: c tokens of the chunk, v this tensor parallel rank's rows of the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.ops.triton_support import has_triton, triton_reaches

CACHED_BYTES_PER_THREAD = 2**20
"""Float32 logits that a CPU thread takes through all elementwise passes at once: they stay in its L2 cache.
Measured on a core with 1 MiB of it: 29 ms for 512 x 50304 logits, 45 ms where each pass runs over all of them."""
CACHED_BYTES_ELSEWHERE = 2**25
"""The same for a GPU without the kernel, after its L2 cache (50 MiB on a Hopper)."""
SMALLEST_SHARE = 2.0**-64
"""Smallest share of a rank's exponentials in the whole sum: a smaller one changes no float32 gradient, and has no
reciprocal."""
SMALLEST_SCALE = 2.0**-20
"""Smallest magnitude of a z-loss's factor of a token's probabilities: for the same reason."""


class ChunkFactors(NamedTuple):
    """Numbers of each token of a chunk, [c] in float32."""

    gradient: Tensor
    """Factor that is left to multiply into the gradient of the logits."""
    log_sum: Tensor
    """log Z: of the sum of the exponentials of all logits."""


def to_gradient(
    logits_cv: Tensor,
    own_labels_c: Tensor,
    losses_c: Tensor,
    group: dist.ProcessGroup,
    is_differentiated: bool,
    z_loss_coefficient: float = 0.0,
) -> ChunkFactors:
    """Write the losses, and turn the logits into their gradient up to a factor per token.

    With a z-loss the gradient is of losses + z_loss_coefficient · (log Z)², the losses stay cross entropies. Of any
    logit that only multiplies the probability in its gradient, by 1 + 2 · z_loss_coefficient · log Z.

    The factors are not applied here because they are cheaper to multiply into matrices narrower than the vocabulary.

    Args:
        logits_cv: contiguous, this rank's part; without `is_differentiated` their content is lost.
        own_labels_c: the labels, counted from this rank's first row: others' lie outside [0, v).
        losses_c: float32, written.
        group: the ranks that share the vocabulary.
    """
    rows = torch.arange(len(own_labels_c), device=own_labels_c.device)
    is_own = (own_labels_c >= 0) & (own_labels_c < logits_cv.shape[1])
    columns = own_labels_c.where(is_own, 0)
    label_c = logits_cv[rows, columns].float()
    greatest_c, sum_c = exponentials(logits_cv)
    (total_c, label_c), factor_c, greatest_c = _over_vocabulary(greatest_c, sum_c, label_c, is_own, group)
    log_total_c = total_c.log()
    torch.sub(log_total_c, label_c, out=losses_c)
    unit_c = sum_c if logits_cv.dtype != torch.float32 else 1.0  # what the exponentials were divided by
    share_c = (unit_c * factor_c / total_c).clamp_min(SMALLEST_SHARE)
    log_sum_c = log_total_c + greatest_c
    if is_differentiated:
        probability_c = label_c.exp() / total_c
        if z_loss_coefficient:
            scale_c = 1 + 2 * z_loss_coefficient * log_sum_c
            scale_c = scale_c.where(scale_c.abs() >= SMALLEST_SCALE, SMALLEST_SCALE)
            probability_c, share_c = probability_c * scale_c, share_c * scale_c
        below_one_c = probability_c - 1  # the label's, rounded once
        logits_cv[rows, columns] = (below_one_c / share_c).to(logits_cv.dtype).where(is_own, logits_cv[rows, columns])
    return ChunkFactors(share_c, log_sum_c)


def _over_vocabulary(
    greatest_c: Tensor, sum_c: Tensor, label_c: Tensor, is_own: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [sum of exponentials, label's logit] of the vocabulary, less the largest one; this rank's factor; and the
    largest logit.
    """
    if group.size() == 1:
        return torch.stack([sum_c, label_c - greatest_c]), torch.ones_like(sum_c), greatest_c
    whole_c = greatest_c.clone()
    dist.all_reduce(whole_c, op=dist.ReduceOp.MAX, group=group)
    factor_c = (greatest_c - whole_c).exp()
    both = torch.stack([sum_c * factor_c, (label_c - whole_c).where(is_own, 0)])
    dist.all_reduce(both, group=group)
    return both, factor_c, whole_c


def exponentials(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and the sum of exponentials relative to it, which replace the logits.

    In 16 bits they are divided by that sum, so that the greatest terms of a gradient, a label's and those that are
    multiplied by a token's factor, are rounded once: of a whole vocabulary the factor is 1. (Otherwise bf16 gradients
    were 1.4 to 1.7 times as far from float32 as those of a plain softmax, at initial weights; in float32 it is one more
    pass for nothing.)

    By a kernel (`cross_entropy_triton`, `cpu_kernels`) where one reaches them, else in PyTorch; both [c], in float32.
    """
    if cpu_kernels.reach(logits_cv):
        return cpu_kernels.softmax(logits_cv)
    return ((_kernel() if triton_reaches(logits_cv) else None) or exponentials_in_torch)(logits_cv)


def _kernel() -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    if not has_triton("the loss head's exponentials run"):
        return None
    from megatron_fanformer.ops import cross_entropy_triton

    return cross_entropy_triton.exponentials


def exponentials_in_torch(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """`exponentials` on any device, a few rows at a time through all passes."""
    greatest, sums = [], []
    for logits in logits_cv.split(_rows_in_cache(logits_cv)):
        values = logits.float()  # themselves in float32
        row_greatest = values.amax(-1, keepdim=True)
        row_sum = values.sub_(row_greatest).exp_().sum(-1, keepdim=True)
        if values is not logits:
            logits.copy_(values.div_(row_sum))
        sums.append(row_sum.squeeze(-1))
        greatest.append(row_greatest.squeeze(-1))
    return torch.cat(greatest), torch.cat(sums)


def _rows_in_cache(logits_cv: Tensor) -> int:
    is_on_cpu = logits_cv.device.type == "cpu"
    cached_bytes = CACHED_BYTES_PER_THREAD * torch.get_num_threads() if is_on_cpu else CACHED_BYTES_ELSEWHERE
    return max(1, cached_bytes // (4 * logits_cv.shape[1]))
