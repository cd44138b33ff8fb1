"""The stand-in's functions: the real extension's signatures, numbers against float64, FP8 against the Engine's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine_on_cpu import attention, extension, norms, optimizer, products, rotary
from tests.small_runs import RunOnRanks

FLOAT32 = 1e-6  # relative to the norm: a few hundred roundings of float32
BF16 = 2.0**-8  # relative to the norm: each number is rounded to eight bits once, or twice
HALF_ULP = {"kFloat8E4M3": 2.0**-4, "kFloat8E5M2": 2.0**-3}  # relative to a number that is not subnormal


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, exact: Tensor, bound: float) -> None:
    assert (found.double() - exact).norm() <= bound * exact.norm()


def test_signatures_are_the_real_extensions() -> None:
    assert extension.signature_differences() == []


# -- products, norms, rotary embedding, attention, optimizer: against float64


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, BF16)])
def test_products(dtype: torch.dtype, bound: float) -> None:
    x, weight, grad, bias = (
        random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(6, 4, 32), (48, 32), (6, 4, 48), (48,)])
    )
    numbers = extension.build().DType
    kind = numbers.kBFloat16 if dtype == torch.bfloat16 else numbers.kFloat32

    def product(a: Tensor, transa: bool, b: Tensor, transb: bool, bias: Tensor | None, grad: bool) -> list[Any]:
        return products.generic_gemm(
            a, transa, b, transb, None, None, kind, bias, kind, False, None, grad, torch.empty(0), 0, False, False
        )

    output, *_ = product(weight, True, x, False, bias, False)
    assert_near(output, x.double() @ weight.double().t() + bias.double(), bound)
    grad_x, *_ = product(weight, False, grad, False, None, False)
    assert_near(grad_x, grad.double() @ weight.double(), bound)
    grad_weight, grad_bias, *_ = product(x, False, grad, True, bias, True)
    assert_near(grad_weight, grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1), bound)
    assert_near(grad_bias, grad.double().sum((0, 1)), bound)


def test_a_product_adds_to_the_float32_gradient() -> None:
    x, grad = random(24, 32, dtype=torch.bfloat16), random(24, 48, dtype=torch.bfloat16, seed=1)
    buffer = random(48, 32, seed=2)
    before = buffer.clone()
    products.generic_gemm(
        x, False, grad, True, buffer, None, None, None, None, False, None, True, torch.empty(0), 0, True, False
    )
    assert_near(buffer, before.double() + grad.double().t() @ x.double(), FLOAT32)


@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_rmsnorm(is_zero_centered: bool) -> None:
    x, weight, grad = random(24, 64), random(64, seed=1), random(24, 64, seed=2)
    kind = extension.build().DType.kFloat32
    output, mean, inverse = norms.rmsnorm_fwd(x, weight, 1e-6, None, None, kind, 0, is_zero_centered)
    grad_x, grad_weight = norms.rmsnorm_bwd(grad, x, inverse, weight, 0, is_zero_centered)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight64 + float(is_zero_centered))
    exact.backward(grad.double())
    assert mean is None
    for found, expected in ((output, exact.detach()), (grad_x, x64.grad), (grad_weight, weight64.grad)):
        assert_near(found, expected, FLOAT32)


def angles(length: int, size: int) -> Tensor:
    half = torch.outer(torch.arange(length), 100.0 ** -torch.linspace(0, 1, size // 2))
    return torch.cat([half, half], -1).view(length, 1, 1, size)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_rotary_embedding(rank: int | None) -> None:
    """Alone, and as either of two context parallel ranks, each of which has two chunks of the sequence."""
    t, grad, freqs = random(8, 2, 3, 16), random(8, 2, 3, 16, seed=1), angles(16, 16)
    sbhd = extension.build().NVTE_QKV_Format.NVTE_SBHD
    size = 1 if rank is None else 2
    positions = {None: range(8), 0: [*range(4), *range(12, 16)], 1: range(4, 12)}[rank]
    turned = rotary.fused_rope_forward(t, freqs, None, sbhd, False, None, size, rank or 0)
    back = rotary.fused_rope_backward(grad, freqs, None, sbhd, False, None, size, rank or 0)
    t64, freqs64 = t.double().requires_grad_(), freqs.double()[list(positions)]
    one, other = t64.chunk(2, -1)
    exact = t64 * freqs64.cos() + torch.cat([-other, one], -1) * freqs64.sin()
    exact.backward(grad.double())
    assert_near(turned, exact.detach(), FLOAT32)
    assert_near(back, t64.grad, FLOAT32)


def test_rotary_embedding_of_queries_and_keys_in_one_tensor() -> None:
    qkv, freqs = random(8, 2, 3, 4 * 16), angles(8, 16)
    sbhd = extension.build().NVTE_QKV_Format.NVTE_SBHD
    query, key, value = rotary.fused_qkv_rope_forward(qkv, freqs, freqs, None, [32, 16, 16], sbhd, False, 1, 0)
    alone = [rotary.fused_rope_forward(t, freqs, None, sbhd, False, None, 1, 0) for t in qkv.split(16, -1)]
    assert torch.equal(query.unflatten(2, (3, 2)), torch.stack(alone[:2], 3))
    assert torch.equal(key, alone[2]) and torch.equal(value, qkv[..., 48:])
    grads = [random(*t.shape, seed=seed) for seed, t in enumerate((query, key, value))]
    back = rotary.fused_qkv_rope_backward(*grads, freqs, freqs, [32, 16, 16], sbhd, False, 1, 0)
    turned_back = [
        rotary.fused_rope_backward(t, freqs, None, sbhd, False, None, 1, 0)
        for t in (*grads[0].unflatten(2, (3, 2)).unbind(3), grads[1])
    ]
    assert torch.equal(back, torch.cat([*turned_back, grads[2]], -1))


@pytest.mark.parametrize("mask", ["NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_CAUSAL_BOTTOM_RIGHT_MASK"])
@pytest.mark.parametrize("layout", ["NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD"])
def test_fused_attention(layout: str, mask: str) -> None:
    """Grouped queries, fewer queries than keys where the mask is of the bottom right."""
    real = extension.build()
    queries, keys = (4, 8) if "BOTTOM" in mask else (8, 8)
    is_sbhd = layout.startswith("NVTE_SBHD")
    q, k, v, grad = (
        random(*((length, 2) if is_sbhd else (2, length)), heads, 16, dtype=torch.bfloat16, seed=seed)
        for seed, (length, heads) in enumerate([(queries, 6), (keys, 3), (keys, 3), (queries, 6)])
    )
    kind, form, masking = real.NVTE_QKV_Layout[layout], real.NVTE_QKV_Format[layout[:9]], real.NVTE_Mask_Type[mask]
    length = torch.tensor([0, keys, 2 * keys])
    common = (None, masking, None, (-1, -1), False)

    def forward(is_training: bool) -> list[Tensor]:
        return attention.fused_attn_fwd(
            *(queries, keys, is_training, 0.25, 0.0, False, kind, form, None, *common, length, length),
            *(q, k, v, q.dtype, *([None] * 9), 0, False, False),
        )

    output, statistics, state = forward(True)
    for evaluated, trained in zip(forward(False), (output, statistics, state), strict=True):
        assert torch.equal(evaluated, trained)  # the Engine's Python takes all three apart in evaluation, too
    grads = attention.fused_attn_bwd(
        *(queries, keys, 0.25, 0.0, False, kind, form, form, kind, None, None, *common, False, length, length),
        *(q, k, v, output, grad, q.dtype, [statistics, state], None, None, None, None, None, False),
    )
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    to = (1, 2, 0, 3) if is_sbhd else (0, 2, 1, 3)
    q64, k64, v64 = (t.permute(to) for t in inputs)
    scores = q64 @ k64.repeat_interleave(2, 1).transpose(-2, -1) * 0.25
    if "CAUSAL" in mask:
        scores = scores.masked_fill(torch.ones(queries, keys).triu(1 + keys - queries).bool(), -torch.inf)
    exact = (scores.softmax(-1) @ v64.repeat_interleave(2, 1)).permute((2, 0, 1, 3) if is_sbhd else to)
    exact.backward(grad.double())
    assert_near(output, exact.detach(), BF16)
    assert_near(statistics.squeeze(-1), scores.logsumexp(-1).detach(), FLOAT32)
    for found, given in zip(grads, inputs, strict=False):
        assert_near(found, given.grad, 2 * BF16)  # probabilities and their gradients are rounded, too


def test_packed_sequences() -> None:
    """Attention and rotary embedding of each are its own; the conversions to padded ones are there and back."""
    real = extension.build()
    thd, sbhd = real.NVTE_QKV_Layout.NVTE_THD_THD_THD, real.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD
    lengths = [5, 1, 8, 2]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = [random(16, heads, 16, dtype=torch.bfloat16, seed=seed) for seed, heads in enumerate((6, 3, 3, 6))]

    def both_ways(kind: Any, form: Any, mask: Any, tensors: list[Tensor], bounds: Tensor) -> list[Tensor]:
        q, k, v, grad = tensors
        common = (None, mask, None, (-1, -1), False)
        output, *kept = attention.fused_attn_fwd(
            *(8, 8, True, 0.25, 0.0, False, kind, form, None, *common, bounds, bounds),
            *(q, k, v, q.dtype, *([None] * 9), 0, False, False),
        )
        grads = attention.fused_attn_bwd(
            *(8, 8, 0.25, 0.0, False, kind, form, form, kind, None, None, *common, False, bounds, bounds),
            *(q, k, v, output, grad, q.dtype, kept, None, None, None, None, None, False),
        )
        return [output, *grads[:3]]

    masks, forms = real.NVTE_Mask_Type, real.NVTE_QKV_Format
    found = both_ways(thd, forms.NVTE_THD, masks.NVTE_PADDING_CAUSAL_MASK, packed, bounds)
    alone = [
        both_ways(sbhd, forms.NVTE_SBHD, masks.NVTE_CAUSAL_MASK, [t.unsqueeze(1) for t in own], torch.tensor([0, 1]))
        for own in zip(*(t.split(lengths) for t in packed), strict=True)
    ]
    for whole, parts in zip(found, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts).squeeze(1))
    freqs = angles(8, 16)
    turned = rotary.fused_rope_forward(packed[0], freqs, None, forms.NVTE_THD, False, bounds, 1, 0)
    each = [
        rotary.fused_rope_forward(own.unsqueeze(1), freqs, None, forms.NVTE_SBHD, False, None, 1, 0)
        for own in packed[0].split(lengths)
    ]
    assert torch.equal(turned, torch.cat(each).squeeze(1))
    padded = attention.convert_thd_to_bshd(packed[0], bounds, 4, 8)
    assert torch.equal(padded[2], packed[0][6:14]) and not padded[0, 5:].any()
    assert torch.equal(attention.convert_bshd_to_thd(padded, bounds, 16), packed[0])


@pytest.mark.parametrize(
    "name", ["scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"]
)
def test_softmaxes(name: str) -> None:
    scores, grad = random(3, 2, 8, 8), random(3, 2, 8, 8, seed=1)
    mask = random(3, 1, 8, 8, seed=2) > 0.5
    given = (mask,) if name == "scaled_masked" else ()
    made = getattr(attention, f"{name}_softmax_forward")(scores, *given, 0.5)
    back = getattr(attention, f"{name}_softmax_backward")(grad, made, 0.5)
    scores64 = scores.double().requires_grad_()
    hidden = mask if given else torch.ones(8, 8).triu(1).bool() if name != "scaled" else torch.zeros(8, 8).bool()
    exact = (scores64 * 0.5).masked_fill(hidden, -10000.0 if given else -torch.inf).softmax(-1)
    exact.backward(grad.double())
    assert_near(made, exact.detach(), FLOAT32)
    assert_near(back, scores64.grad, FLOAT32)


@pytest.mark.parametrize("has_main", [False, True])
def test_adam(has_main: bool) -> None:
    kind = torch.bfloat16 if has_main else torch.float32
    parameter, gradient = random(40), random(40, seed=1)
    stored, first, second, main = parameter.to(kind), torch.zeros(40), torch.zeros(40), parameter.to(kind).float()
    exact = torch.nn.Parameter(main.double().clone())
    reference = torch.optim.AdamW([exact], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        lists = [[gradient], [stored], [first], [second], *([[main]] if has_main else [])]
        optimizer.multi_tensor_adam(0, torch.zeros(1), lists, 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, 0.1)
        exact.grad = gradient.double()
        reference.step()
    assert_near(main if has_main else stored, exact.detach(), FLOAT32)
    assert torch.equal(stored, main.to(kind)) or not has_main


def test_scales_and_norms() -> None:
    tensors, out = [random(7), random(3, 5, seed=1)], [torch.empty(7), torch.empty(3, 5)]
    flag = torch.zeros(1, dtype=torch.int)
    optimizer.multi_tensor_scale_tensor(0, flag, [tensors, out], torch.tensor(0.5))
    assert all(torch.equal(scaled, 0.5 * tensor) for scaled, tensor in zip(out, tensors, strict=True))
    whole, each = optimizer.multi_tensor_l2norm(0, flag, [tensors], True)
    assert_near(whole, torch.cat([t.double().flatten() for t in tensors]).norm().view(1), FLOAT32)
    assert_near(each, torch.stack([t.double().norm() for t in tensors]), FLOAT32)
    assert not flag.item()
    optimizer.multi_tensor_scale(0, flag, [[torch.tensor([torch.inf])], [torch.empty(1)]], 1.0)
    assert flag.item()


# -- FP8, on a rank: it needs the Engine's classes


def fp8_errors(recipe: str, kind: str) -> dict[str, float]:
    """Largest error of a quantised tensor, as the Engine's own Python reads it, over what rounding may make of it."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import tensor as tensors

    from tests.engine_on_cpu import fp8

    x = random(256, 384, dtype=torch.bfloat16) * torch.logspace(-2, 2, 384).bfloat16()
    dtype = tex.DType[kind]
    scale, amax = torch.tensor([2.0]), torch.zeros(1)
    quantizer = {
        "delayed": lambda: tensors.Float8Quantizer(scale, amax, dtype),
        "tensorwise": lambda: tensors.Float8CurrentScalingQuantizer(dtype, torch.device("cpu")),
        "blockwise": lambda: tensors.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=1),
        "blockwise-square": lambda: tensors.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True),
    }[recipe]()
    quantised = quantizer(x)
    found = {"rows": _error(quantised.dequantize(dtype=torch.float32), x, kind)}
    found["as a product reads rows"] = _error(fp8.values(quantised, columnwise=False), x, kind)
    found["as a product reads columns"] = _error(fp8.values(quantised, columnwise=True), x, kind)
    same = torch.equal(fp8.values(quantised, columnwise=False), quantised.dequantize(dtype=torch.float32))
    quantised.update_usage(rowwise_usage=False, columnwise_usage=True)
    columns = quantised.dequantize(dtype=torch.float32)
    same = same and torch.equal(fp8.values(quantised, columnwise=True), columns)
    found["differs from the Engine's own reading"] = float(not same)
    if recipe == "delayed":
        assert amax.item() == x.float().abs().amax().item()
    return found


def _error(found: Tensor, x: Tensor, kind: str) -> float:
    """Of numbers within six powers of two of their block's largest: the rest may be subnormal in FP8."""
    exact = x.float()
    counts = exact.abs() > exact.abs().amax() * 2.0**-6
    return ((found - exact).abs() / exact.abs())[counts].amax().item() / HALF_ULP[kind]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "blockwise-square"])
def test_fp8_rounds_to_nearest_as_the_engine_reads_it(run_on_engine_ranks: RunOnRanks, recipe: str) -> None:
    for kind in HALF_ULP:
        (errors,) = run_on_engine_ranks(1, fp8_errors, recipe, kind)
        assert errors.pop("differs from the Engine's own reading") == 0.0
        if recipe != "delayed":  # whose scale is given, and clamps what is beyond
            assert all(error <= 1.0 for error in errors.values()), errors


def delayed_updates() -> bool:
    """Whether the update of scales is the one that the Engine writes out in Python, over some steps."""
    import transformer_engine_torch as tex
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import quantization

    from tests.engine_on_cpu import fp8

    same = True
    for algorithm in ("max", "most_recent"):
        recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, margin=1)
        history, scale = torch.zeros(3, 4), torch.ones(4)
        their_history, their_scale = history.clone(), scale.clone()
        for step in range(5):
            newest = random(4, seed=step).abs()
            newest[0] = 0.0
            fp8.fused_amax_and_scale_update_after_reduction(
                newest, [history], [scale], algorithm, tex.DType.kFloat8E4M3, 1.0
            )
            their_history[0] = newest
            quantization._amax_and_scale_update(their_history, their_scale, 448.0, recipe)
            same = same and torch.equal(history, their_history) and torch.equal(scale, their_scale)
    return same


def test_delayed_scales_follow_the_engines_own_rule(run_on_engine_ranks: RunOnRanks) -> None:
    assert run_on_engine_ranks(1, delayed_updates) == [True]
