"""Support for this project's Triton kernels: which tensors they take, and whether Triton can run here."""

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
"""The smallest Python module in C: to launch kernels, Triton must be able to build such modules."""

_devices = {"cuda"}


def triton_takes(tensor: Tensor) -> bool:
    """Return whether kernels can take this tensor, provided that Triton runs (`has_triton`)."""
    return tensor.device.type in _devices and tensor.dtype in KERNEL_TYPES


@contextmanager
def triton_on(device: str) -> Iterator[None]:
    """Let kernels take tensors of this device, too: of "cpu" in a process with Triton's interpreter."""
    added = {device} - _devices
    _devices.update(added)
    try:
        yield
    finally:
        _devices.difference_update(added)


@functools.cache
def has_triton(*, warning_start: str) -> bool:
    """Return whether Triton can run kernels; if not, warn once, by a sentence that begins with `warning_start`."""
    problem = _problem()
    if problem:
        warnings.warn(f"{warning_start} in PyTorch, at a fraction of a kernel's speed, since {problem}", stacklevel=2)
    return problem is None


def _problem() -> str | None:
    """Return why Triton cannot run kernels, or None."""
    try:
        import triton
        from triton.runtime.build import compile_module_from_src
    except ModuleNotFoundError:
        return "triton, which CUDA builds of torch include, is not installed; install it"
    if triton.knobs.runtime.interpret:  # the interpreter builds nothing
        return None
    try:
        compile_module_from_src(PROBE_SOURCE, PROBE, [], [], [])
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return (
            f"Triton cannot build the C code that launches a kernel ({error}); install a C compiler, such as gcc, and "
            "Python's header files"
        )
    return None
