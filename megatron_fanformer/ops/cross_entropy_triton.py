"""Turns logits [c, V] of c tokens into exponentials by one Triton kernel, a program for each row.

The first pass over a row finds the largest logit and the sum of exponentials relative to it. The second pass writes;
the row (100 KB of bfloat16 at a vocabulary of 50304) is then still in the GPU's L2 cache.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (Triton takes the annotations of its functions for Triton types.)

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits per block: four 16-byte loads of bfloat16 for each thread of eight warps."""
WARPS = 8


def exponentials(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each logit by exp(logit - largest logit of the row); 16-bit results are divided by their row's sum.

    Args:
        logits_cv: contiguous; float32, bfloat16 or float16.

    Returns:
        The largest logit of each row, and its sum before any division or rounding, [c] in float32.
    """
    tokens, vocabulary = logits_cv.shape
    greatest_c, sum_c = torch.empty(2, tokens, dtype=torch.float32, device=logits_cv.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _exponentials[(tokens,)](logits_cv, greatest_c, sum_c, V=vocabulary, BLOCK=block, num_warps=WARPS)
    return greatest_c, sum_c


@triton.jit
def _exponentials(logits_cv, greatest_c, sum_c, V: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    row = logits_cv + token.to(tl.int64) * V  # 64 bits: there may be more than 2^31 logits
    columns = tl.arange(0, BLOCK)
    greatest = tl.load(row).to(tl.float32)  # the largest logit so far
    total = 0.0  # the sum of exp(logit - greatest) so far
    for begin in range(0, V, BLOCK):
        logits = tl.load(row + begin + columns, mask=begin + columns < V, other=-float("inf")).to(tl.float32)
        new_greatest = tl.maximum(greatest, tl.max(logits))
        total = total * tl.exp(greatest - new_greatest) + tl.sum(tl.exp(logits - new_greatest))
        greatest = new_greatest
    tl.store(greatest_c + token, greatest)
    tl.store(sum_c + token, total)
    share = 1 / total
    for begin in range(0, V, BLOCK):
        is_column = begin + columns < V
        logits = tl.load(row + begin + columns, mask=is_column, other=-float("inf")).to(tl.float32)
        values = tl.exp(logits - greatest)
        if logits_cv.dtype.element_ty != tl.float32:  # 16-bit results are divided here, which rounds them only once
            values *= share
        tl.store(row + begin + columns, values.to(logits_cv.dtype.element_ty), mask=is_column)
