"""Which tensors this project's Triton kernels accept."""

import functools
import warnings

import torch
from torch import Tensor

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_reaches(tensor: Tensor) -> bool:
    """Whether a kernel can run on this tensor, if Triton is installed."""
    return tensor.is_cuda and tensor.dtype in KERNEL_TYPES


@functools.cache
def has_triton(what: str) -> bool:
    """Whether Triton is installed; if not, a warning says once that `what` does without it."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        warnings.warn(
            f"{what} in PyTorch, at a fraction of a kernel's speed, since triton, which CUDA builds of torch include, "
            "is not installed; install it",
            stacklevel=2,
        )
        return False
    return True
