"""FP8 of the stand-in: quantisation as the Engine's kernels define it, in all four recipes.

- A scale is FP8's largest number over the largest magnitude (of the past for `delayed`, of the whole tensor for
  `tensorwise`, of a block for `blockwise` and `mxfp8`); values are multiplied by it, clamped and rounded to nearest,
  ties to even.
- The columnwise form of a tensor is what a product along its rows reads. By tensor it is the same numbers transposed;
  by block it is quantised along the other axis.

Shapes: m rows (all axes but the last), n columns.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine_on_cpu.number_types import to_torch

FLOAT_MAX = torch.finfo(torch.float32).max
BLOCK = 128
MX_BLOCK = 32
E8M0_BIAS = 127


# -- what a product multiplies


def is_quantized(operand: Any) -> bool:
    """Whether it is one of the Engine's FP8 tensors."""
    return hasattr(operand, "_fp8_dtype")


def values(operand: Any, *, columnwise: bool) -> Tensor:
    """The numbers of an operand in float32 [.., n], from the form that a GPU would read."""
    if not is_quantized(operand):
        return operand.float()
    if hasattr(operand, "_scale_inv"):
        return _by_tensor_values(operand, columnwise)
    return _by_block_values(operand, columnwise)


def _by_tensor_values(operand: Any, columnwise: bool) -> Tensor:
    kind = to_torch(operand._fp8_dtype)
    if columnwise and not _has_one_form():
        assert operand._transpose is not None and not operand._transpose_invalid, "its transpose was not made"
        return operand._transpose.view(kind).float().movedim(0, -1) * operand._scale_inv
    assert operand._data is not None, "its rowwise form was not made"
    return operand._data.view(kind).float() * operand._scale_inv


def _has_one_form() -> bool:
    """From Blackwell on, products read FP8 by tensor along either axis, and no transpose is made."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return is_non_tn_fp8_gemm_supported()


def _by_block_values(operand: Any, columnwise: bool) -> Tensor:
    kind = to_torch(operand._fp8_dtype)
    data = operand._columnwise_data if columnwise else operand._rowwise_data
    scales = operand._columnwise_scale_inv if columnwise else operand._rowwise_scale_inv
    assert data is not None, f"its {'columnwise' if columnwise else 'rowwise'} form was not made"
    numbers = data.view(kind).float()
    if scales.dtype == torch.uint8:
        return (numbers.flatten(0, -2) * _spread_mx(scales, numbers, columnwise)).view(numbers.shape)
    if not columnwise:
        return (numbers.flatten(0, -2) * _spread(scales, numbers, operand._is_2D_scaled)).view(numbers.shape)
    spread = _spread(scales, numbers.flatten(1), operand._is_2D_scaled)  # its data are transposed: [n, ..]
    return (numbers.flatten(1) * spread).view(numbers.shape).movedim(0, -1)


def _spread(scales: Tensor, numbers: Tensor, is_square: bool) -> Tensor:
    """Each element's scale [m, n], of blocks of 128 along the last axis (or in both)."""
    rows, columns = math.prod(numbers.shape[:-1]), numbers.shape[-1]
    if is_square:
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        spread = scales.t().repeat_interleave(BLOCK, 1)
    return spread[:rows, :columns]


def _spread_mx(exponents: Tensor, numbers: Tensor, columnwise: bool) -> Tensor:
    rows, columns = math.prod(numbers.shape[:-1]), numbers.shape[-1]
    scales = torch.exp2(exponents.float() - E8M0_BIAS)
    return scales.repeat_interleave(MX_BLOCK, 0 if columnwise else 1)[:rows, :columns]


# -- quantisation


def has_scale_before(quantizer: Any) -> bool:
    """Whether the scale does not depend on the tensor at hand (`delayed`)."""
    return type(quantizer).__name__ == "Float8Quantizer"


def quantize(
    tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Any:
    """The tensor in FP8, in the forms that the quantizer asks for; into `output` where it is given.

    Args:
        noop: leave the output as it is if this flag is set.
        dtype: what the result pretends to be; the tensor's own type where it is not given.
    """
    if output is None:
        output = create_empty_quantized_tensor(
            quantizer, list(tensor.shape), dtype or tensor.dtype, tensor.device, False
        )
    if noop is not None and noop.item():
        return output
    {
        "Float8Quantizer": _quantize_delayed,
        "Float8CurrentScalingQuantizer": _quantize_tensorwise,
        "Float8BlockQuantizer": _quantize_blockwise,
        "MXFP8Quantizer": _quantize_mx,
    }[type(quantizer).__name__](tensor.detach().float(), quantizer, output)
    return output


def _cast(scaled: Tensor, fp8_dtype: Any) -> Tensor:
    kind = to_torch(fp8_dtype)
    limit = torch.finfo(kind).max
    return scaled.clamp(-limit, limit).to(kind).view(torch.uint8)


def _largest(fp8_dtype: Any) -> float:
    return torch.finfo(to_torch(fp8_dtype)).max


def _scale_for(amax: Tensor, fp8_dtype: Any, *, epsilon: float, powers_of_two: bool) -> Tensor:
    """FP8's largest number over a magnitude; 1 where there is none, the largest float where it would be infinite."""
    amax = amax.clamp(min=epsilon)
    scale = (_largest(fp8_dtype) / amax).clamp(max=FLOAT_MAX)
    scale = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)
    if powers_of_two:  # downwards: the mantissa's bits are dropped
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scale


def _write_by_tensor(x: Tensor, scale: Tensor, quantizer: Any, output: Any) -> None:
    data = _cast(x * scale, quantizer.dtype)
    output._scale_inv.copy_(1.0 / scale)
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(data.movedim(-1, 0))
        output._transpose_invalid = False


def _quantize_delayed(x: Tensor, quantizer: Any, output: Any) -> None:
    if x.numel():
        torch.maximum(quantizer.amax, x.abs().amax(), out=quantizer.amax)
    _write_by_tensor(x, quantizer.scale, quantizer, output)


def _quantize_tensorwise(x: Tensor, quantizer: Any, output: Any) -> None:
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    scale = _scale_for(
        amax, quantizer.dtype, epsilon=quantizer.amax_epsilon, powers_of_two=quantizer.force_pow_2_scales
    )
    _write_by_tensor(x, scale, quantizer, output)


def _quantize_blockwise(x: Tensor, quantizer: Any, output: Any) -> None:
    x_mn = x.reshape(-1, x.shape[-1])
    if output._rowwise_data is not None:
        _write_blocks(x_mn, quantizer, output._rowwise_data, output._rowwise_scale_inv)
    if output._columnwise_data is not None:
        _write_blocks(x_mn.t(), quantizer, output._columnwise_data, output._columnwise_scale_inv)


def _write_blocks(x_mn: Tensor, quantizer: Any, data: Tensor, scale_inv: Tensor) -> None:
    is_square = quantizer.block_scaling_dim == 2
    rows, columns = x_mn.shape
    height = BLOCK if is_square else 1
    padded = torch.nn.functional.pad(x_mn, (0, -columns % BLOCK, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))
    scale = _scale_for(
        blocks.abs().amax((1, 3)),
        quantizer.dtype,
        epsilon=quantizer.amax_epsilon,
        powers_of_two=quantizer.force_pow_2_scales,
    )
    scaled = (blocks * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    data.copy_(_cast(scaled, quantizer.dtype).view(data.shape))
    inverse = 1.0 / scale if is_square else (1.0 / scale).t()
    scale_inv.zero_()
    scale_inv[: inverse.shape[0], : inverse.shape[1]] = inverse


def _quantize_mx(x: Tensor, quantizer: Any, output: Any) -> None:
    x_mn = x.reshape(-1, x.shape[-1])
    if output._rowwise_data is not None:
        data, exponents = _mx_blocks(x_mn, quantizer)
        output._rowwise_data.copy_(data.view(output._rowwise_data.shape))
        _fill_corner(output._rowwise_scale_inv, exponents)
    if output._columnwise_data is not None:
        data, exponents = _mx_blocks(x_mn.t(), quantizer)
        output._columnwise_data.copy_(data.t().reshape(output._columnwise_data.shape))
        _fill_corner(output._columnwise_scale_inv, exponents.t())


def _mx_blocks(x_mn: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Data [m, n] and biased exponents [m, n / 32], rounded up so that no block's largest number is clamped."""
    blocks = x_mn.unflatten(1, (-1, MX_BLOCK))
    ratio = blocks.abs().amax(-1) / _largest(quantizer.dtype)
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa 2^exponent, 0.5 <= mantissa < 1
    upwards = torch.where(mantissa == 0.5, exponent - 1, exponent)
    biased = torch.where(ratio > 0, (upwards + E8M0_BIAS).clamp(0, 254), torch.zeros_like(upwards))
    scaled = blocks * torch.exp2(E8M0_BIAS - biased.float()).unsqueeze(-1)
    return _cast(scaled.flatten(1), quantizer.dtype), biased.to(torch.uint8)


def _fill_corner(whole: Tensor, part: Tensor) -> None:
    whole.zero_()
    whole[: part.shape[0], : part.shape[1]] = part


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """An FP8 tensor of a quantizer's kind and forms, its numbers undefined."""
    if type(quantizer).__name__ != "Float8Quantizer":
        meta = quantizer.storage_metadata(dtype)
        tensors = quantizer.alloc_tensors(shape, device=device)
        names = _constructor_names(meta["cls"])
        parts = {names[attribute]: tensors.get(attribute) for attribute in names}
        return _constructed(meta["cls"], shape, dtype, device, {**parts, **meta["nontensor_kwargs"]})
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    has_one_form = _has_one_form()
    has_data = quantizer.rowwise_usage or has_one_form
    has_transpose = quantizer.columnwise_usage and not has_one_form
    parts = {
        "data": torch.empty(shape, dtype=torch.uint8, device=device) if has_data else None,
        "data_transpose": (
            torch.empty([shape[-1], *shape[:-1]], dtype=torch.uint8, device=device) if has_transpose else None
        ),
        "fp8_scale_inv": torch.empty(1, dtype=torch.float32, device=device),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "fake_dtype": dtype,
    }
    kind = Float8TensorStorage if quantizer.internal else Float8Tensor
    return _constructed(kind, shape, dtype, device, parts)


def _constructor_names(kind: type) -> dict[str, str]:
    """An FP8 class's tensors: attribute to constructor's argument."""
    if "Float8TensorStorage" in {base.__name__ for base in kind.__mro__}:
        return {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    forms = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    return {f"_{name}": name for name in forms}


def _constructed(kind: type, shape: list[int], dtype: torch.dtype, device: torch.device, parts: dict[str, Any]) -> Any:
    if not issubclass(kind, Tensor):  # of internal use: no shape, no torch.Tensor
        return kind(**parts)
    parts = {name: value for name, value in parts.items() if name != "fake_dtype"}
    return kind(shape=shape, dtype=dtype, device=device, **parts)


# -- what surrounds it


def dequantize(input: Any, otype: Any) -> Tensor:
    """The numbers of an FP8 tensor."""
    is_columnwise = getattr(input, "_rowwise_data", getattr(input, "_data", None)) is None
    return values(input, columnwise=is_columnwise).to(to_torch(otype))


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """The sum over the rows, which is a bias's gradient, and the tensor in FP8."""
    return [input.float().flatten(0, -2).sum(0).to(input.dtype), quantize(input, quantizer)]


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None) -> Tensor:
    """[.., n] to [n, ..]."""
    transposed = input.movedim(-1, 0).contiguous()
    return transposed if out is None else out.copy_(transposed)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None) -> Tensor:
    """[a, b, ..] to [b, a, ..]: what ranks gathered of a transposed tensor, row by row again."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """The largest magnitude."""
    amax.fill_(input.abs().amax().float())


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """`delayed`: each history [length, tensors] takes its reduced magnitudes, and gives the next scales [tensors]."""
    widths = [history.shape[1] for history in amax_histories]
    for newest, history, scale in zip(amax_reduction_buffer.split(widths), amax_histories, scales, strict=True):
        history[0] = newest
        amax = history.amax(0) if amax_compute_algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0] = 0.0
        wanted = (_largest(fp8_dtype) / amax / 2.0**margin).clamp(max=FLOAT_MAX)
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), wanted, scale))
