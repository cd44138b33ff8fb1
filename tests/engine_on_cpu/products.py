"""Matrix products of the stand-in, in float32 accumulation, as cuBLAS computes them.

Operands are plain tensors or the Engine's FP8 ones; what reaches a product is what a GPU would multiply.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.engine_on_cpu import fp8
from tests.engine_on_cpu.number_types import to_torch

watchers: list[Callable[["Product"], None]] = []
"""Are told of every product: tests ask which ones were in FP8."""


class Product:
    """What one call of the extension's product was asked for."""

    def __init__(self, a: Any, b: Any, *, layout: str, accumulates: bool) -> None:
        self.layout, self.accumulates = layout, accumulates
        self.shapes = (tuple(a.size()), tuple(b.size()))
        self.in_fp8 = (fp8.is_quantized(a), fp8.is_quantized(b))


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """op(B) op(A) of row-major matrices [.., k]: the output, the bias's gradient, GELU's input, the extra output.

    The order is that of column-major A B. With `grad` a bias is a request for the sum over B's rows.
    """
    if quantizer is not None or gelu or comm_overlap is not None or extra_output is not None:
        raise NotImplementedError("generic_gemm: quantized outputs, GELU and overlap are not in the stand-in")
    for watcher in watchers:
        layout = ("T" if transA else "N") + ("T" if transB else "N")
        watcher(Product(A, B, layout=layout, accumulates=bool(accumulate)))
    a = fp8.values(A, columnwise=not transA)
    b = fp8.values(B, columnwise=transB)
    a_2d, b_2d = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    result = (b_2d.t() if transB else b_2d) @ (a_2d.t() if transA else a_2d)
    if alpha != 1.0:
        result *= alpha
    leading = (b.shape[-1],) if transB else tuple(b.shape[:-1])
    result = result.view(*leading, a_2d.shape[0] if transA else a_2d.shape[1])
    bias_grad = None
    if bias is not None:
        if grad:
            bias_grad = b_2d.sum(0).to(bias.dtype)
        else:
            result += bias.float()
    if D is None:
        dtype = to_torch(output_dtype) if output_dtype is not None else A.dtype
        return [result.to(dtype), bias_grad, None, None]
    out = D.view(result.shape)
    if accumulate:
        out.add_(result if beta in (None, 1.0) else result + (beta - 1.0) * out)
    else:
        out.copy_(result)
    return [D, bias_grad, None, None]
