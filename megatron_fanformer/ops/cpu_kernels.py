"""This project's kernels for a CPU (`cpu_kernels.cpp`), which the machine's C++ compiler builds once.

After `load`, a process can use the kernels on tensors in float32 or bf16 that `can_take` accepts; for other tensors the
callers use PyTorch's operations. A kernel rounds its result once, PyTorch after each operation. In bf16, products use
the CPU's matrix unit (AMX) or AVX512-BF16. docs/lab-log.md has the part of a training step that each kernel saves.

Shapes: of attention as in `attention`; c tokens of a chunk, v columns of the vocabulary.
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
MOST_SECONDS = 120  # of one call of the compiler
TYPES = (torch.float32, torch.bfloat16)
WORD_BYTES = 4  # the unit in which a kernel reads the factors of a product

_library: Any = None
_problem: str | None = "they were not loaded"


def load(cache: Path) -> str | None:
    """Load the kernels into this process, and build their library first if the cache lacks it.

    Args:
        cache: the folder for the library; only this user may write to it.

    Returns:
        Why this machine cannot use the kernels, or None if they are loaded.
    """
    global _library, _problem
    if _library is None:
        _library, _problem = _open_library(cache)
    return _problem


def unload(problem: str) -> None:
    """Make this process use PyTorch's operations again; `problem` is the reason that is reported."""
    global _library, _problem
    _library, _problem = None, problem


def problem() -> str | None:
    """Return why this process does not use the kernels, or None if it does."""
    return _problem


def _open_library(cache: Path) -> tuple[Any, str | None]:
    """Return the library and None, or None and the reason why there is no library."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None, f"they are for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None, f"no C++ compiler is found ({', '.join(COMPILERS)})"
    try:
        return ctypes.CDLL(str(_build_library(Path(compiler), cache))), None
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        return None, f"they cannot be built by {compiler} in {cache} ({reason})"


def _build_library(compiler: Path, cache: Path) -> Path:
    """Return the path of the library for this source, compiler and CPU, and build it if the cache lacks it.

    Processes that start together may each build the library; each replaces it by an equal one.
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
            # Without -fopenmp: a second OpenMP must not be linked beside torch's.
            run([str(compiler), "-shared", str(compiled), "-o", str(partial)])
            publish(partial, library)
        finally:
            for file in (compiled, partial):
                file.unlink(missing_ok=True)
    return library


def can_take(*tensors: Tensor) -> bool:
    """Return whether the kernels are loaded, and the tensors are of one supported type, on a CPU, and dense in rows."""
    return _library is not None and all(
        _is_readable(tensor) and tensor.dtype in TYPES and tensor.dtype == tensors[0].dtype for tensor in tensors
    )


def _is_readable(tensor: Tensor) -> bool:
    """Return whether kernels can read a tensor: a plain one (not simulated or traced), on a CPU, and dense in rows."""
    return type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.stride(-1) == 1


def softmax(logits_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each row by its softmax, in float32 by exp(logit - largest logit), see `cross_entropy.exponentials`.

    Returns:
        The largest logit, and the sum of exp(logit - largest logit), both [c] in float32.
    """
    greatest_c, sum_c = (logits_cv.new_empty(len(logits_cv), dtype=torch.float32) for _ in range(2))
    _call("softmax", logits_cv, greatest_c, sum_c, *logits_cv.shape)
    return greatest_c, sum_c


def can_take_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `causal_attention` can take the tensors: shapes must be equal, and heads fill whole words."""
    has_whole_words = query.shape[-1] * query.element_size() % WORD_BYTES == 0
    return can_take(query, key, value) and query.shape == key.shape == value.shape and has_whole_words


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v, where a query sees the keys up to the query's own position.

    Returns:
        The output, [b, n, s, d], whose memory is contiguous as [s, b, n, d]; and the logarithm of each query's sum of
        exponentials, [b, n, s] in float32.
    """
    batch, heads, length, size = query.shape
    out = query.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
    log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
    strides = _strides(query, key, value, out, out)  # `out` again, for the gradient that only a backward pass has
    _call("causal_attention", query, key, value, out, log_sums, strides, *query.shape, float(scale))
    return out, log_sums


def causal_attention_backward(
    qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sums: Tensor, grad: Tensor, scale: float
) -> list[Tensor]:
    """Return the gradients of queries, keys and values, [b, n, s, d], whose memory is contiguous as [s, b, n, d]."""
    batch, heads, length, size = out.shape
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grads = [out.new_empty(length, batch, heads, size) for _ in qkv]
    strides = _strides(*qkv, out, grad)
    _call("causal_attention_backward", *qkv, out, grad, log_sums, *grads, strides, *out.shape, float(scale))
    return [grad.permute(1, 2, 0, 3) for grad in grads]


def _strides(*tensors: Tensor) -> Any:
    """Return a C array of the tensors' strides of batch, then of heads, then of positions."""
    strides = [tensor.stride(axis) for axis in range(3) for tensor in tensors]
    return (ctypes.c_int64 * len(strides))(*strides)


def _call(name: str, first: Tensor, *arguments: Any) -> None:
    """Call the kernel `name` for the type of the first tensor."""
    kernel = getattr(_library, f"{name}_{str(first.dtype).removeprefix('torch.')}")
    with torch.profiler.record_function(f"{__name__}.{name}"):  # profilers see only what is recorded
        kernel(*map(_c_value, (first, *arguments)))


def _c_value(value: Any) -> Any:
    """Return a tensor as its pointer, an integer with 64 bits, a float with 32 bits, and a C array as it is."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_float(value) if isinstance(value, float) else value
