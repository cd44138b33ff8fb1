"""Gradients that the local layers write out themselves: against numerical ones, and against PyTorch's own formulas."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.ops.element_wise import _RMSNorm, _SwiGLU, rms_norm, rotate

EPS = 1e-6
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of values up to about 4: float32's, and bf16's last places
TYPES = [torch.float32, torch.bfloat16]


def plain_swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def angles(length: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    half = torch.arange(length, dtype=dtype)[:, None] * torch.logspace(0, -4, size // 2, dtype=dtype)
    return torch.cat([half, half], dim=-1)[:, None, None]


def plain_rotation(x: Tensor, turned: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turned.cos() + torch.cat([-second, first], dim=-1) * turned.sin()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def test_gradients_are_the_numerical_ones() -> None:
    double = torch.float64
    assert torch.autograd.gradcheck(_SwiGLU.apply, (random(3, 2, 10, dtype=double),))
    norm_inputs = (random(3, 2, 7, dtype=double), random(7, dtype=double))
    assert torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, EPS), norm_inputs)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles(5, 6, double)), (random(5, 2, 3, 6, dtype=double),))


def check(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Outputs and gradients of ours in the inputs' type, and of the plain form in float64."""
    outputs = []
    for function, given in ((ours, inputs), (plain, [x.detach().double().requires_grad_() for x in inputs])):
        output = function(*given)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        outputs.append([output, *torch.autograd.grad(output, given, upstream)])
    for own, expected in zip(*outputs, strict=True):
        assert own.dtype == inputs[0].dtype
        greatest = expected.abs().max().item()
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=CLOSE[own.dtype] * max(1.0, greatest))


@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    check(_SwiGLU.apply, plain_swiglu, random(5, 3, 34, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    check(lambda x, w: rms_norm(x, w, EPS), plain_rms_norm, random(5, 3, 33, dtype=dtype), random(33, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_rotation(dtype: torch.dtype) -> None:
    strided = random(40, 3, 4, 30, dtype=dtype)  # queries are a part of QKV's output
    check(
        lambda x: rotate(x[..., 2:10], angles(40, 8)),
        lambda x: plain_rotation(x[..., 2:10], angles(40, 8, torch.float64)),
        strided,
    )


def test_megatrons_rotation_is_replaced_by_the_same_one() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    x = random(9, 2, 3, 8, dtype=torch.float32)
    ours = rope_utils._apply_rotary_pos_emb_bshd(x, angles(9, 8), rotary_interleaved=False)
    torch.testing.assert_close(ours, plain_rotation(x, angles(9, 8)), rtol=0, atol=CLOSE[torch.float32])
    in_part = rope_utils._apply_rotary_pos_emb_bshd(x, angles(9, 4), rotary_interleaved=False)
    torch.testing.assert_close(in_part[..., 4:], x[..., 4:])
    torch.testing.assert_close(in_part[..., :4], plain_rotation(x[..., :4], angles(9, 4)))


def test_outputs_in_float32_are_the_plain_operations_bit_for_bit() -> None:
    single = torch.float32
    x, weight, gates = random(6, 3, 32, dtype=single), random(32, dtype=single), random(6, 3, 34, dtype=single)
    assert torch.equal(rms_norm(x, weight, EPS), F.rms_norm(x, weight.shape, weight, EPS))
    assert torch.equal(_SwiGLU.apply(gates), plain_swiglu(gates))
    heads = random(6, 2, 3, 8, dtype=single)
    assert torch.equal(rotate(heads, angles(6, 8)), plain_rotation(heads, angles(6, 8)))
