"""The FAN kernel as it is built for a GPU: against float64, against PyTorch, large, and inside the layer."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig, FANformerConfig, KernelsConfig
from megatron_fanformer.ops import fan_activation
from megatron_fanformer.ops.fan_activation import EAGER, Implementation
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed
from megatron_fanformer.runtime.seeding import seed_everything
from tests.gpu.making import ON_GPU, needs_gpu, needs_real_gpu
from tests.ops import fan_numbers
from tests.ops.fan_numbers import CASES, STRIDES, TYPES

pytestmark = [
    *needs_gpu,
    needs_real_gpu,  # Triton's kernels
]

# A last bit of float32 decides a rounding to bfloat16 once in some 2^14 elements, to float16 eight times as often.
DIFFERING_SHARE = {torch.bfloat16: 1e-3, torch.float16: 5e-3}
# What differs by one bfloat16 unit here and there in two layers' activations: of logits and gradients, relative.
LAYER_ERROR = 2e-2
LARGE_BYTES = 60 * 2**30


def storage_of(tensor: Tensor) -> Tensor:
    """All elements of a tensor's storage, those that it does not show too."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy on the GPU with the same strides, in a copy of the same storage."""
    return storage_of(tensor).cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def kernel_from_cpu() -> Implementation:
    """The kernel for tensors that are not on the GPU, for the checks that know of none."""
    form = fan_activation.implementation_for(torch.empty(0, device="cuda"))
    assert form is not EAGER

    def activate(pre_tnr: Tensor, x_f_nw: Tensor, periodic: int, gelu: bool) -> Tensor | None:
        made = on_gpu(x_f_nw)
        g = form.activate(on_gpu(pre_tnr), made, periodic, gelu)
        storage_of(x_f_nw).copy_(storage_of(made))
        return None if g is None else g.cpu()

    def differentiate(x_f_nw: Tensor, grad_nw: Tensor, g_nv: Tensor | None, part: Tensor, periodic: int) -> None:
        made = on_gpu(part)
        form.differentiate(on_gpu(x_f_nw), on_gpu(grad_nw), None if g_nv is None else on_gpu(g_nv), made, periodic)
        storage_of(part).copy_(storage_of(made))

    return Implementation(activate, differentiate)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["plain", "gelu"])
def test_output_and_gradient(gelu: bool, dtype: torch.dtype) -> None:
    for case in CASES:
        fan_numbers.check_output(kernel_from_cpu(), case, dtype, gelu)
        fan_numbers.check_gradient(kernel_from_cpu(), case, dtype, gelu)
    for strided in STRIDES:
        fan_numbers.check_gradient(kernel_from_cpu(), CASES[0], dtype, gelu, strided)


@pytest.mark.parametrize("largest", [0.8, 100.0, 1e4, 12_000.0, 1e6, 1e38])
def test_phases_of_any_size(largest: float) -> None:
    fan_numbers.check_large_phases(kernel_from_cpu(), largest)


def test_what_is_no_number() -> None:
    fan_numbers.check_no_number(kernel_from_cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_phase_gets_what_pytorch_gives_it(dtype: torch.dtype) -> None:
    assert fan_numbers.differing_share(kernel_from_cpu(), EAGER, dtype) <= DIFFERING_SHARE[dtype]


CONFIG = FANformerConfig(
    num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=512, seq_length=128
)
FANS = {
    "qkv": FANConfig(),
    "gelu": FANConfig(activation="gelu", p_ratio=0.15),  # 38 periodic rows
    "own values": FANConfig(placement="qk_and_v", v_p_ratio=0.125),
}


@pytest.fixture
def differentiated() -> Iterator[list[Implementation]]:
    """The forms that backward passes took."""
    taken: list[Implementation] = []
    choose = fan_activation.implementation_for

    def noted(tensor: Tensor) -> Implementation:
        taken.append(choose(tensor))
        return taken[-1]

    with mock.patch.object(fan_activation, "implementation_for", noted):
        yield taken


def losses_and_gradients(fan: FANConfig, dtype: torch.dtype) -> list[Tensor]:
    """Token losses of the initial model of seed 3, and the gradients of its weights."""
    with distributed(ParallelConfig(), runtime=ON_GPU) as grid:
        seed_everything(0)
        config = FANformerConfig(**{**CONFIG.__dict__, "fan": fan})
        kernels = KernelsConfig(transformer_impl="local")
        (stage,) = build_stages(config, ParallelConfig(), grid, dtype=dtype, seed=3, kernels=kernels)
        tokens = torch.arange(128, device="cuda").unsqueeze(0)
        losses = stage(tokens, tokens, None, labels=tokens + 1)
        losses.mean().backward()
        return [losses.detach().float().cpu(), *(p.grad.float().cpu() for p in stage.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FANS)
def test_the_model_with_the_kernel_is_the_model_without(name: str, dtype: Any, differentiated: Any) -> None:
    kernel = losses_and_gradients(FANS[name], dtype)
    assert differentiated and EAGER not in differentiated
    with mock.patch.object(fan_activation, "triton_takes", lambda _: False):
        plain = losses_and_gradients(FANS[name], dtype)
    allowed = 1e-5 if dtype == torch.float32 else LAYER_ERROR
    for actual, expected in zip(kernel, plain, strict=True):
        assert (actual - expected).norm() <= allowed * expected.norm()
