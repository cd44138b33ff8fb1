"""This project's kernels for a CPU (`cpu_*.cpp`), which the machine's C++ compiler builds once.

A process that has called `load` uses them, on real tensors in float32 or bf16; everywhere else their callers have
PyTorch's operations. The kernels round a result once, where those round after each operation.

Shapes: as in `element_wise`; of attention as in `attention`.
"""

import ctypes
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_fanformer.ops.libraries import COMPILERS, build_library, find_compiler

SOURCES = [Path(__file__).with_name(name) for name in ("cpu_kernels.cpp", "cpu_attention.cpp")]
HEADER = Path(__file__).with_name("cpu_kernels.h")
OPTIONS_OF_MACHINES = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
OPTIONS = (
    *("-std=c++17", "-O3", *OPTIONS_OF_MACHINES.get(platform.machine(), ())),
    *("-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp"),
)
TYPES = (torch.float32, torch.bfloat16)
BYTES_OF_A_WORD = 4  # what a product's factors are made of
MOST_BYTES_OF_A_VECTOR = 64
LEAST_PARTS, ROWS_OF_A_PART = 32, 256
"""The gradient of a norm's weight is summed over the rows of each part, and then over the parts: the same for any
number of threads, and no long sum."""

_library: Any = None
_problem: str | None = "nobody asked for them"


def load(cache: Path) -> str | None:
    """Make this process use them from now on.

    Args:
        cache: a folder of this user's alone, in which the library is, or is put.

    Returns:
        Why they cannot be used on this machine; None: they are in use.
    """
    global _library, _problem
    if _library is None:
        _library, _problem = _loaded(cache)
    return _problem


def unload(problem: str) -> None:
    """Make this process compute by PyTorch's operations again, and say why."""
    global _library, _problem
    _library, _problem = None, problem


def problem() -> str | None:
    """Return why this process does not use them; None: it does."""
    return _problem


def _loaded(cache: Path) -> tuple[Any, str | None]:
    """Return the library, or why there is none."""
    if platform.system() != "Linux" or platform.machine() not in OPTIONS_OF_MACHINES:
        machines = " and ".join(OPTIONS_OF_MACHINES)
        return None, f"they are for Linux on {machines}, and this is {platform.system()} on {platform.machine()}"
    compiler = find_compiler()
    if compiler is None:
        return None, f"no C++ compiler is found ({', '.join(COMPILERS)})"
    try:
        return ctypes.CDLL(str(_built(compiler, cache))), None
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        return None, f"they cannot be built by {compiler} in {cache} ({reason})"


def reach(*tensors: Tensor) -> bool:
    """Return whether this process uses them, and they can take these: of one type, float32 or bf16, `in_memory`."""
    return _library is not None and all(
        in_memory(each) and each.dtype in TYPES and each.dtype == tensors[0].dtype for each in tensors
    )


def in_memory(tensor: Tensor) -> bool:
    """Return whether a pointer to it says enough: a real tensor on a CPU, whose last axis lies in one piece.

    Simulated tensors have no content, and a tracer would not see what is done by pointers.
    """
    return type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.stride(-1) == 1


def _built(compiler: Path, cache: Path) -> Path:
    # Without -fopenmp at linking, so that no second OpenMP is linked: torch's is the process's.
    return build_library("cpu-kernels", SOURCES, OPTIONS, headers=[HEADER], compiler=compiler, cache=cache)


# -- the kernels, on tensors that they reach


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 f] -> [..., f]."""
    gate_and_up, width = gate_and_up.contiguous(), gate_and_up.shape[-1] // 2
    out = gate_and_up.new_empty(*gate_and_up.shape[:-1], width)
    _call("swiglu", gate_and_up, out, out.numel() // width, width)
    return out


def swiglu_backward(gate_and_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of [gate | up]."""
    gate_and_up, grad = gate_and_up.contiguous(), grad.contiguous()
    grad_both = torch.empty_like(gate_and_up)
    _call("swiglu_backward", gate_and_up, grad, grad_both, grad.numel() // grad.shape[-1], grad.shape[-1])
    return grad_both


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised [..., h], and the factors [..., 1] in float32 by which rows were multiplied."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _call("rms_norm", x, weight, float(eps), out, scale, scale.numel(), x.shape[-1])
    return out, scale


def rms_norm_backward(x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    x, grad = x.contiguous(), grad.contiguous()
    parts = max(LEAST_PARTS, scale.numel() // ROWS_OF_A_PART)
    grad_x, grad_weight = torch.empty_like(x), scale.new_empty(parts, x.shape[-1])
    _call("rms_norm_backward", x, weight, scale, grad, grad_x, grad_weight, parts, scale.numel(), x.shape[-1])
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return pairs (i, i + d / 2) of [s, b, n, d] rotated by angles whose cos and sin are [s, 1, 1, d / 2] in
    float32.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    positions, batch, heads, size = x.shape
    angles = (each.float().contiguous() for each in (cos, sin))
    _call("rotate", x, *angles, float(sign), out, positions, batch, heads, size // 2, *x.stride()[:3])
    return out


def softmax(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each row by its softmax, in float32 by its exponentials alone.

    Returns:
        The largest logit and the sum of exponentials relative to it, [c] in float32.
    """
    greatest_c, sum_c = (logits_cv.new_empty(len(logits_cv), dtype=torch.float32) for _ in range(2))
    _call("softmax", logits_cv, greatest_c, sum_c, *logits_cv.shape)
    return greatest_c, sum_c


def reaches_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `causal_attention` can take them: as many of each, and heads of whole words."""
    of_whole_words = query.shape[-1] * query.element_size() % BYTES_OF_A_WORD == 0
    return reach(query, key, value) and query.shape == key.shape == value.shape and of_whole_words


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v of [b, n, s, d], each query of which sees the keys up to its own.

    Returns:
        What is seen, [b, n, s, d], contiguous as [s, b, n, d]; the logarithms of the sums of exponentials, [b, n, s] in
        float32.
    """
    batch, heads, length, size = query.shape
    out = query.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
    log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
    strides = _strides(query, key, value, out, out)
    sizes = batch, heads, length, size, float(scale)
    _call("causal_attention", query, key, value, out, log_sums, strides, *sizes)
    return out, log_sums


def causal_attention_backward(
    qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sums: Tensor, grad: Tensor, scale: float
) -> list[Tensor]:
    """Return the gradients of queries, keys and values, all [b, n, s, d], contiguous as [s, b, n, d]."""
    batch, heads, length, size = out.shape
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grads = [out.new_empty(length, batch, heads, size) for _ in qkv]
    strides = _strides(*qkv, out, grad)
    sizes = batch, heads, length, size, float(scale)
    _call("causal_attention_backward", *qkv, out, grad, log_sums, *grads, strides, *sizes)
    return [each.permute(1, 2, 0, 3) for each in grads]


def reaches_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> bool:
    """Return whether `add_product` can take them: sums in float32, of rows that are whole vectors."""
    are_whole_vectors = sum_oh.shape[-1] * sum_oh.element_size() % MOST_BYTES_OF_A_VECTOR == 0
    return reach(grad_no, x_nh) and in_memory(sum_oh) and sum_oh.dtype == torch.float32 and are_whole_vectors


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add the product of the first, transposed, and the second to the sums."""
    matrices = [part for each in (grad_no, x_nh, sum_oh) for part in (each, each.stride(0))]
    _call("add_product", *matrices, len(x_nh), *sum_oh.shape)


def _strides(*tensors: Tensor) -> Any:
    """Return the strides of batch, head and position of tensors [b, n, s, d]."""
    strides = [each.stride(axis) for axis in range(3) for each in tensors]
    return (ctypes.c_int64 * len(strides))(*strides)


def _call(name: str, *arguments: Any) -> None:
    """Call a kernel of the first tensor's type: tensors by their pointers, integers of 64 bits, others in float32."""
    first = next(each for each in arguments if isinstance(each, Tensor))
    kernel = getattr(_library, f"{name}_{str(first.dtype).removeprefix('torch.')}")
    with torch.profiler.record_function(f"{__name__}.{name}"):  # or a profiler would not see it
        kernel(*map(_argument, arguments))


def _argument(given: Any) -> Any:
    if isinstance(given, Tensor):
        return ctypes.c_void_p(given.data_ptr())
    if isinstance(given, int):
        return ctypes.c_int64(given)
    return ctypes.c_float(given) if isinstance(given, float) else given
