"""The chunked loss head on a GPU: its kernel, its gradients beside the plain head's, and the memory that it saves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANformerConfig, KernelsConfig
from megatron_fanformer.ops import cross_entropy
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.step import wrap_stages
from tests.gpu.making import ON_GPU, needs_gpu, needs_real_gpu

pytestmark = needs_gpu

CONFIG = FANformerConfig(
    num_layers=1,
    hidden_size=512,
    ffn_hidden_size=512,
    num_attention_heads=4,
    vocab_size=50_304,
    seq_length=1024,
    untie_embeddings_and_output_weights=True,
)
CHUNK_TOKENS = 192  # a rest of 64
# Times the plain head's own distance from float32: the same roundings, sums of other lengths.
AS_GOOD = 1.05
SAME_FP32 = 1e-5  # relative to the greatest element; without TF32
SAME_LOSS = 1e-5  # nats, of the same logits
ROUNDING = {
    torch.float32: 3e-6,
    torch.bfloat16: 2**-8,
}  # relative, of exponentials of differences below 64, or their shares


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    with distributed(ParallelConfig(), runtime=ON_GPU) as grid:
        seed_everything(0)  # megatron-core's layers on a GPU draw weights, which are then drawn by name
        yield grid


@needs_real_gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 250, 50_304, 128_257])
def test_the_kernel_is_the_torch_form(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(37, vocabulary, device="cuda")).to(dtype)
    kernel = cross_entropy._triton_kernel()
    assert kernel is not None
    found, expected = logits.clone(), logits.clone()
    greatest_c, sum_c = kernel(found)
    expected_greatest_c, expected_sum_c = cross_entropy.exponentials_in_torch(expected)
    assert torch.equal(greatest_c, expected_greatest_c)
    torch.testing.assert_close(sum_c, expected_sum_c, rtol=1e-5, atol=0)
    torch.testing.assert_close(found, expected, rtol=2 * ROUNDING[dtype], atol=0)


def outcome(grid: Any, dtype: torch.dtype, is_fused: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """Losses, gradients of the hidden states and in the buffer after two micro batches, and peak memory in bytes."""
    parallel = ParallelConfig()
    kernels = KernelsConfig(transformer_impl="local", chunked_loss_head=is_fused, loss_head_chunk_tokens=CHUNK_TOKENS)
    (stage,) = build_stages(CONFIG, parallel, grid, dtype=dtype, seed=0, kernels=kernels)
    (wrapped,) = wrap_stages([stage], parallel)
    wrapped.zero_grad_buffer()
    head = stage.output_layer
    generator = torch.Generator().manual_seed(0)
    shape = (CONFIG.seq_length, 1)
    x_sbh = torch.randn(*shape, CONFIG.hidden_size, generator=generator).to("cuda", dtype).requires_grad_()
    labels_sb = torch.randint(CONFIG.vocab_size, shape, generator=generator).cuda()
    mask_sb = (torch.rand(shape, generator=generator) < 0.8).float().cuda()
    for _ in range(2):
        x_sbh.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if is_fused:
            losses_sb = head.losses(x_sbh, labels_sb=labels_sb, loss_mask_sb=mask_sb)
        else:
            losses_sb = stage.compute_language_model_loss(labels_sb.t(), head(x_sbh)[0]).t()
        (losses_sb * mask_sb).sum().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return losses_sb.detach(), x_sbh.grad, head.weight.main_grad.clone(), peak


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def greatest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_gradients_are_the_plain_heads(grid: Any) -> None:
    losses, x, weight, _ = outcome(grid, torch.float32, True)
    plain_losses, plain_x, plain_weight, _ = outcome(grid, torch.float32, False)
    assert (losses - plain_losses).abs().max() < SAME_LOSS
    assert greatest_error(x, plain_x) < SAME_FP32
    assert greatest_error(weight, plain_weight) < SAME_FP32


def test_bf16_is_as_near_to_float32_as_the_plain_head(grid: Any) -> None:
    _, exact_x, exact_weight, _ = outcome(grid, torch.float32, False)
    losses, x, weight, _ = outcome(grid, torch.bfloat16, True)
    plain_losses, plain_x, plain_weight, _ = outcome(grid, torch.bfloat16, False)
    assert (losses - plain_losses).abs().max() < SAME_LOSS
    assert distance(x, exact_x) < AS_GOOD * distance(plain_x, exact_x)
    assert distance(weight, exact_weight) < AS_GOOD * distance(plain_weight, exact_weight)


@needs_real_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_less_than_the_plain_heads(grid: Any, dtype: torch.dtype) -> None:
    peak, plain_peak = (outcome(grid, dtype, is_fused)[-1] for is_fused in (True, False))
    assert plain_peak - peak > 4 * (CONFIG.seq_length - CHUNK_TOKENS) * CONFIG.vocab_size
