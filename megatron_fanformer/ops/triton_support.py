"""Support for this project's Triton kernels: which tensors they accept, and whether Triton can run them."""

import functools
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PROBE = "fanformer_probe"
PROBE_SOURCE = f"""
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{PROBE}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{PROBE}(void) {{ return PyModule_Create(&module); }}
"""
"""A Python module in C, as small as can be: Triton builds one to reach a GPU, and keeps it in its cache."""

_reached_devices = {"cuda"}


def triton_reaches(tensor: Tensor) -> bool:
    """Return whether a kernel can run on this tensor, if Triton can run any."""
    return tensor.device.type in _reached_devices and tensor.dtype in KERNEL_TYPES


@contextmanager
def reaching(device: str) -> Iterator[None]:
    """Let kernels run on tensors of this device, too: on "cpu" in a process in which Triton interprets them."""
    added = {device} - _reached_devices
    _reached_devices.update(added)
    try:
        yield
    finally:
        _reached_devices.difference_update(added)


@functools.cache
def has_triton(user: str) -> bool:
    """Return whether Triton can run kernels; if not, a warning says once that `user` does without it."""
    problem = _problem()
    if problem:
        warnings.warn(f"{user} in PyTorch, at a fraction of a kernel's speed, since {problem}", stacklevel=2)
    return problem is None


def _problem() -> str | None:
    try:
        import triton
        from triton.runtime.build import compile_module_from_src
    except ModuleNotFoundError:
        return "triton, which CUDA builds of torch include, is not installed; install it"
    if triton.knobs.runtime.interpret:  # nothing is built
        return None
    try:
        compile_module_from_src(PROBE_SOURCE, PROBE, [], [], [])
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return (
            f"Triton cannot build the C code that launches one ({error}); install a C compiler, such as gcc, and "
            "Python's header files"
        )
    return None
