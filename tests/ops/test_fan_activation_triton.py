"""The FAN kernel in Triton's interpreter and the PyTorch form, both against float64; and the kernel built for a GPU."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.ops import fan_activation, triton_support
from tests.ops import fan_numbers
from tests.ops.fan_numbers import CASES, STRIDES, TYPES
from tests.ops.triton_kernels import built_for_a_gpu, needs_triton

FORMS = ["eager", pytest.param("kernel", marks=needs_triton)]
# Measured: 0 of both. Another NumPy's or PyTorch's last bit of float32 may decide a rounding.
DIFFERING_SHARE = {torch.bfloat16: 1e-4, torch.float16: 1e-3}


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`run("kernel", check, *arguments)`: calls `check(form, *arguments)` where that form runs."""

    def run_form(name: str, check: Callable[..., Any], *arguments: Any) -> Any:
        if name == "eager":
            return check(fan_activation.EAGER, *arguments)
        return request.getfixturevalue("interpreter").submit(with_kernel, check, *arguments).result()

    return run_form


def with_kernel(check: Callable[..., Any], *arguments: Any) -> Any:
    form = fan_activation._triton_kernel()
    assert form is not None
    return check(form, *arguments)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["plain", "gelu"])
@pytest.mark.parametrize("name", FORMS)
def test_output_and_gradient(run: Any, name: str, gelu: bool, dtype: torch.dtype) -> None:
    for case in CASES:
        run(name, fan_numbers.check_output, case, dtype, gelu)
        run(name, fan_numbers.check_gradient, case, dtype, gelu)


@pytest.mark.parametrize("strided", STRIDES)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_any_strides(run: Any, name: str, strided: str) -> None:
    for case in CASES[:3]:
        run(name, fan_numbers.check_gradient, case, torch.bfloat16, False, strided)


@pytest.mark.parametrize("largest", [0.8, 100.0, 1e4, 12_000.0, 1e6, 1e38])
@pytest.mark.parametrize("name", FORMS)
def test_phases_of_any_size(run: Any, name: str, largest: float) -> None:
    run(name, fan_numbers.check_large_phases, largest)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_number(run: Any, name: str) -> None:
    run(name, fan_numbers.check_no_number)


def kernel_against_eager(form: fan_activation.Implementation, dtype: torch.dtype) -> float:
    return fan_numbers.differing_share(form, fan_activation.EAGER, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_phase_gets_what_pytorch_gives_it(run: Any, dtype: torch.dtype) -> None:
    assert run("kernel", kernel_against_eager, dtype) <= DIFFERING_SHARE[dtype]


def layers_output_and_gradient(gelu: bool, kernel: bool) -> list[torch.Tensor]:
    """Of the autograd function with two outputs of different widths."""
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()
    from megatron_fanformer.model.fan_functions import Activation, FANActivation, FANOutput, FANShard

    activation = Activation(FANShard(1, 0, (FANOutput(5, 9), FANOutput(2, 4))), None, gelu)
    pre = torch.randn(7, 2, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with triton_support.triton_on("cpu") if kernel else nullcontext():
        made = FANActivation.apply(pre, activation)
        cotangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in made]
        (gradient,) = torch.autograd.grad(made, pre, cotangents)
    return [*(x.detach() for x in made), gradient]


@needs_triton
@pytest.mark.parametrize("gelu", [False, True], ids=["plain", "gelu"])
def test_the_layers_function_takes_the_kernel(interpreter: ProcessPoolExecutor, gelu: bool) -> None:
    found = interpreter.submit(layers_output_and_gradient, gelu, True).result()
    for actual, expected in zip(found, layers_output_and_gradient(gelu, False), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)  # a few last bits of float32


def test_pytorch_serves_where_the_kernel_cannot() -> None:
    for dtype in (*TYPES, torch.float64):
        assert fan_activation.implementation_for(torch.empty(1, dtype=dtype)) is fan_activation.EAGER


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_triton
def test_a_missing_c_compiler_is_said(monkeypatch: pytest.MonkeyPatch, empty_cache: None) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    triton_support.has_triton.cache_clear()
    with triton_support.triton_on("cpu"), pytest.warns(UserWarning, match="Triton cannot build .* C compiler"):
        assert fan_activation.implementation_for(torch.empty(1)) is fan_activation.EAGER
    triton_support.has_triton.cache_clear()


# -- as a GPU would run it


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["_fan_activate", "_fan_differentiate"])
def test_kernels_build_for_a_gpu_with_16_byte_accesses(name: str, dtype: str, empty_cache: None) -> None:
    from megatron_fanformer.ops import fan_activation_triton as kernels

    kernel = getattr(kernels, name)
    element_bytes = 4 if dtype == "fp32" else 2
    sizes = {"RANKS": 2, "P": 256, "G": 512, "GELU": False, "PRE_STRIDE": 768, "GRAD_STRIDE": 2048}
    tokens = kernels.TILE_BYTES // (kernels.TILE_COLUMNS * element_bytes)
    sizes |= {"GRAD_PRE_STRIDE": 768, "TILE_TOKENS": tokens, "TILE_COLUMNS": kernels.TILE_COLUMNS, "g_nv": None}
    types = {**dict.fromkeys(kernel.arg_names, f"*{dtype}"), "tokens": "i32", "rank_stride": "i64"}
    built = built_for_a_gpu(kernel, types, sizes, kernels.WARPS)
    assembly = built["ptx"]
    # Tiles of periodic rows and of linear rows: loads and stores that the loop for large phases has not.
    loads, stores = {"_fan_activate": (2, 3), "_fan_differentiate": (5, 2)}[name]
    threads_loads = kernels.TILE_BYTES // 16 // (32 * kernels.WARPS)
    assert assembly.count("ld.global.v4.b32") == loads * threads_loads
    assert assembly.count("st.global.v4.b32") == stores * threads_loads
    assert built["cubin"]
