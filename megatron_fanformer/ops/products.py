"""Products that are added to a sum of a wider type: a weight's gradient in bf16 to the float32 one of a step.

Shapes: n tokens, o a weight's output rows, h its input width.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels

ROWS_A_BLOCK = 4096
"""Rows of a weight's gradient that are held twice where the product cannot add to a float32 one."""
PROBE_SIZE = 16  # a multiple that every kernel takes
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # of CBLAS


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add the product of the first, transposed, and the second, with sums in the accumulator's type where possible."""
    if sum_oh.dtype == x_nh.dtype:
        sum_oh.addmm_(grad_no.t(), x_nh)
    elif adds_to_wider(sum_oh.dtype, x_nh.dtype, sum_oh.device):
        torch.addmm(sum_oh, grad_no.t(), x_nh, out_dtype=sum_oh.dtype, out=sum_oh)
    elif _mkl_reaches(sum_oh, grad_no, x_nh) and (product := mkl_product()) is not None:
        grad, x, sums = ((each.data_ptr(), each.stride(0)) for each in (grad_no, x_nh, sum_oh))
        with torch.profiler.record_function(f"{__name__}.mkl_product"):  # or a profiler would not see it
            product(ROW_MAJOR, TRANSPOSED, AS_IT_IS, *sum_oh.shape, len(x_nh), 1.0, *grad, *x, 1.0, *sums)
    elif cpu_kernels.reaches_product(sum_oh, grad_no, x_nh):
        cpu_kernels.add_product(sum_oh, grad_no, x_nh)
    else:
        for sums, grad in zip(sum_oh.split(ROWS_A_BLOCK), grad_no.split(ROWS_A_BLOCK, dim=1), strict=True):
            sums.add_(grad.t() @ x_nh)


@functools.cache
def adds_to_wider(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Return whether torch can add a product to a sum of a wider type, in place: tried once, on a small one.

    It can on CUDA, since a change of November 2025 (pytorch/pytorch#167931); before it raised, or lost the sum.
    """
    sums = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=wide, device=device)
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=narrow, device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=wide, out=sums)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((sums == 1 + PROBE_SIZE).all())


@functools.cache
def mkl_product() -> Any | None:
    """MKL's product of two bf16 matrices with float32 sums, `cblas_gemm_bf16bf16f32`, which torch's library contains.

    Returns:
        None on a CPU without bf16 matrix units (AMX), where this project's own is faster, and in a build of torch
        without MKL.
    """
    if not torch.cpu._is_amx_tile_supported():
        return None
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    number, factor, matrix = ctypes.c_int, ctypes.c_float, (ctypes.c_void_p, ctypes.c_int)
    found.argtypes = [*[number] * 6, factor, *matrix, *matrix, factor, *matrix]
    found.restype = None
    return found


def _mkl_reaches(sum_oh: Tensor, *factors: Tensor) -> bool:
    """Return whether pointers can be given of them, and they are of the types that MKL takes."""
    return (
        all(map(cpu_kernels.in_memory, (sum_oh, *factors)))
        and sum_oh.dtype == torch.float32
        and all(each.dtype == torch.bfloat16 for each in factors)
    )
