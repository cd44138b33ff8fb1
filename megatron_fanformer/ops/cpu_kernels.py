"""This project's kernels for a CPU (`cpu_kernels.cpp`), which the machine's C++ compiler builds once.

A process that has called `load` uses them, on real tensors in float32 or bf16; everywhere else their callers have
PyTorch's operations. The kernels round a result once, where those round after each operation. Kept are those that save
3% of a training step in bf16 or float32 on a CPU with AVX512-BF16 (docs/lab-log.md).

Shapes: of attention as in `attention`; c tokens of a chunk, v columns of the vocabulary, f inner size of the MLP; of
products as in `matrices`.
"""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_fanformer.durable_files import publish, temporary_name

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512"),
    *("-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp"),
)
MOST_SECONDS = 120  # to build them
TYPES = (torch.float32, torch.bfloat16)
BYTES_OF_A_WORD = 4  # a product's factors are made of words
MOST_BYTES_OF_A_VECTOR = 64

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
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None, f"they are for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None, f"no C++ compiler is found ({', '.join(COMPILERS)})"
    try:
        return ctypes.CDLL(str(_built(Path(compiler), cache))), None
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        return None, f"they cannot be built by {compiler} in {cache} ({reason})"


def _built(compiler: Path, cache: Path) -> Path:
    """Return the library of this source, compiler and CPU, built if it is not there.

    Processes that start together may all build it: the same file.
    """
    program = compiler.resolve()
    flags = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")}
    key = f"{OPTIONS} {program} {program.stat().st_mtime_ns} {sorted(flags)} {SOURCE.read_text(encoding='utf-8')}"
    library = cache / f"cpu-kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = temporary_name(library)
        compiled = partial.with_name(f"{partial.name}.o")
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=MOST_SECONDS)
        try:
            run([str(compiler), *OPTIONS, "-c", str(SOURCE), "-o", str(compiled)])
            # Without -fopenmp, so that no second OpenMP is linked: torch's is the process's.
            run([str(compiler), "-shared", str(compiled), "-o", str(partial)])
            publish(partial, library)
        finally:
            for file in (compiled, partial):
                file.unlink(missing_ok=True)
    return library


def reach(*tensors: Tensor) -> bool:
    """Return whether this process uses them, and they can take these: of one type, and real tensors on a CPU, whose
    last axis lies in one piece.

    Simulated tensors have no content, and a tracer would not see work done by pointers.
    """
    return _library is not None and all(
        _in_memory(tensor) and tensor.dtype in TYPES and tensor.dtype == tensors[0].dtype for tensor in tensors
    )


def _in_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.stride(-1) == 1


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


def reaches_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> bool:
    """Return whether `add_product` can take them: a float32 sum whose rows are whole vectors."""
    is_whole = sum_oh.shape[-1] * sum_oh.element_size() % MOST_BYTES_OF_A_VECTOR == 0
    return reach(grad_no, x_nh) and _in_memory(sum_oh) and sum_oh.dtype == torch.float32 and is_whole


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add the product of the second, transposed, and the third to the sums."""
    strides = grad_no.stride(0), x_nh.stride(0), sum_oh.stride(0)
    _call("add_product", grad_no, strides[0], x_nh, strides[1], sum_oh, strides[2], len(x_nh), *sum_oh.shape)


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
    return [grad.permute(1, 2, 0, 3) for grad in grads]


def _strides(*tensors: Tensor) -> Any:
    """Return the strides of batch, head and position of tensors [b, n, s, d]."""
    strides = [tensor.stride(axis) for axis in range(3) for tensor in tensors]
    return (ctypes.c_int64 * len(strides))(*strides)


def _call(name: str, first: Tensor, *arguments: Any) -> None:
    """Call a kernel of the first tensor's type: tensors by their pointers, integers of 64 bits, others in float32."""
    kernel = getattr(_library, f"{name}_{str(first.dtype).removeprefix('torch.')}")
    with torch.profiler.record_function(f"{__name__}.{name}"):  # or a profiler would not see it
        kernel(*map(_argument, (first, *arguments)))


def _argument(given: Any) -> Any:
    if isinstance(given, Tensor):
        return ctypes.c_void_p(given.data_ptr())
    if isinstance(given, int):
        return ctypes.c_int64(given)
    return ctypes.c_float(given) if isinstance(given, float) else given
