"""This project's Triton kernels where there is no GPU: whether Triton is there, and what it builds for one."""

import importlib.util
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed; the extra `dev` brings it on Linux"
)
HOPPER = 90


def built_for_a_gpu(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, Any]:
    """What Triton builds a kernel to, by its name (`ptx`, `cubin`); the assembly shows how it reaches memory.

    Args:
        types: of the arguments that are no constants; all but those of 32 bits are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(signature)}
    values = {places[name]: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    aligned = {
        places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind not in ("constexpr", "i32")
    }
    source = triton.compiler.ASTSource(kernel, signature, values, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": warps})
    asm: dict[str, Any] = built.asm
    return asm
