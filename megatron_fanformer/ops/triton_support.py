"""Which tensors this project's Triton kernels can take."""

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
    """Whether Triton is installed; where it is not, a warning says once that `what` does without."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        warnings.warn(
            f"{what} in PyTorch, at a fraction of a kernel's speed: triton, which CUDA builds of torch bring, is not "
            "installed; install it",
            stacklevel=2,
        )
        return False
    return True
