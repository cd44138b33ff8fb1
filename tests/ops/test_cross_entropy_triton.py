"""Both forms of the loss head's exponentials against float64: the kernel's in Triton's interpreter; and it builds."""

from typing import Any

import pytest
import torch

from megatron_fanformer.ops import cross_entropy
from tests.ops.triton_kernels import built_for_a_gpu, needs_triton

FORMS = ["torch", pytest.param("kernel", marks=needs_triton)]
SIZES = [(5, 1), (3, 7), (4, 250), (2, 20_011)]  # the last: more than two blocks of the kernel, and a rest
SAME_SUM = 2e-6  # relative: as many float32 roundings as a sum of 20,000 in blocks has
# Relative. In float32 that of the difference, below 64, and exp's own; Triton's interpreter cuts bfloat16 off where a
# GPU, as PyTorch, rounds.
FLOAT32_ROUNDING = 2**-19 + 4e-7
ROUNDING = {("torch", torch.bfloat16): 2**-8, ("kernel", torch.bfloat16): 2**-7}


def turned(form: str, logits_cv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the logits are turned to, the greatest and the sums."""
    exponentials = cross_entropy._triton_kernel() if form == "kernel" else cross_entropy.exponentials_in_torch
    assert exponentials is not None
    greatest_c, sum_c = exponentials(logits_cv)
    return logits_cv, greatest_c, sum_c


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    def run_form(form: str, logits_cv: torch.Tensor) -> Any:
        if form == "torch":
            return turned(form, logits_cv.clone())
        return request.getfixturevalue("interpreter").submit(turned, form, logits_cv.clone()).result()

    return run_form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_exponentials_are_exact_to_rounding(run: Any, form: str, dtype: torch.dtype) -> None:
    for tokens, vocabulary in SIZES:
        logits = (torch.randn(tokens, vocabulary) * 5).to(dtype)
        values, greatest_c, sum_c = run(form, logits)
        exact = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
        assert torch.equal(greatest_c, logits.float().amax(-1))
        torch.testing.assert_close(sum_c.double(), exact.sum(-1), rtol=SAME_SUM, atol=0)
        if dtype == torch.bfloat16:
            exact /= exact.sum(-1, keepdim=True)
        rounding = FLOAT32_ROUNDING + ROUNDING.get((form, dtype), 0)
        torch.testing.assert_close(values.double(), exact, rtol=rounding, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_extremes(run: Any, form: str) -> None:
    """Greatest first, last and everywhere; far apart; not finite."""
    rows = [[9e4, 0, -9e4], [-9e4, 0, 9e4], [-9e4] * 3, [torch.nan, 0, 1], [0, torch.inf, 1]]
    values, _, sum_c = run(form, torch.tensor(rows))
    assert values[:3].tolist() == [[1, 0, 0], [0, 0, 1], [1, 1, 1]]
    assert sum_c[:3].tolist() == [1, 1, 3]
    assert sum_c[3:].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_builds_for_a_gpu_with_16_byte_accesses(
    dtype: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_fanformer.ops import cross_entropy_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits_cv": f"*{dtype}", "greatest_c": "*fp32", "sum_c": "*fp32"}
    built = built_for_a_gpu(kernels._exponentials, types, {"V": 50_304, "BLOCK": kernels.BLOCK}, kernels.WARPS)
    assembly = built["ptx"]
    threads_accesses = kernels.BLOCK * (4 if dtype == "fp32" else 2) // 16 // (32 * kernels.WARPS)
    assert assembly.count("ld.global.v4.b32") == 2 * threads_accesses
    assert assembly.count("st.global.v4.b32") == threads_accesses
    assert built["cubin"]
