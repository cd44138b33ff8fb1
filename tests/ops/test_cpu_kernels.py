"""This project's kernels for a CPU, against the same functions in float64; what is done without a compiler.

They are built for the instruction sets of older CPUs, too, and run on one thread and on three. PyTorch's operations,
which take their place where there is no compiler, are held to the same by its code for older CPUs.
"""

import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.ops.attention import attention
from megatron_fanformer.ops.cross_entropy import exponentials
from tests.small_runs import write_program

ROUNDED_ONCE = 2.0**-9  # relative: of the norm of many elements, each rounded to bf16 (1.7e-3; rounded twice, 2.4e-3)
PYTORCHS_SUM = 5e-7  # measured 4e-7
OF_FEW = 1.01 * 2.0**-8  # the most that it changes a single one
SUMMED = 2 * ROUNDED_ONCE  # attention sums rounded products; PyTorch's own gradients are 4.6e-3 off
IN_FLOAT32 = 2e-6  # of a norm: a few roundings, and exp to a unit in the last place
LONG_SUM = 3e-7  # of a float32 sum of any length: measured 7e-8 on every instruction set, PyTorch's 4e-7
LONG_ATTENTION = 7e-7  # of a norm, 4,096 keys and queries: measured 4.5e-7, PyTorch's 4.6e-7
TYPES = [torch.float32, torch.bfloat16]
MACHINES = ["native", *(["x86-64-v3", "x86-64-v4"] if platform.machine() == "x86_64" else [])]
"""With what this CPU has; without AVX-512; with it, and without its units for bf16."""


@pytest.fixture(scope="module", params=MACHINES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with the kernels, built for a machine."""
    if request.param == "x86-64-v4" and not torch.cpu._is_avx512_supported():
        pytest.skip("this CPU has no AVX-512")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_kernels, "OPTIONS", (*cpu_kernels.OPTIONS, f"-march={request.param}"))
        if problem := cpu_kernels.load(cache):
            pytest.skip(problem)
        cpu_kernels.unload("each test loads them")
        yield cache


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def kernels(request: pytest.FixtureRequest, library: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    assert cpu_kernels.load(library) is None
    yield
    cpu_kernels.unload("the test is over")
    torch.set_num_threads(threads)


def assert_rounded(made: Tensor, exact: Tensor, most: float, in_float32: float = IN_FLOAT32) -> None:
    """To bf16 with an error of at most that part, or to float32."""
    bound = most if made.dtype == torch.bfloat16 else in_float32
    assert (made.double() - exact).norm() <= bound * exact.norm().clamp_min(1)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """What a function returns, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [1, 33, 5000, 50_304, 151_936])
def test_softmax_of_a_row(kernels: None, columns: int, dtype: torch.dtype) -> None:
    """Impossible columns have a probability of 0; one that is not a number spoils its row alone."""
    logits = (5 * torch.randn(7, columns)).to(dtype)
    logits[1, columns // 2 :] = torch.finfo(logits.dtype).min
    logits[2, columns // 2] = torch.nan
    exact, given = logits.double().softmax(-1), logits.double()
    greatest, sums = exponentials(logits)
    for row in (0, 1, *range(3, len(logits))):
        shares = logits[row] if dtype == torch.bfloat16 else logits[row] / sums[row]
        assert_rounded(shares, exact[row], OF_FEW)
        assert greatest[row] == given[row].max()
        expected = (given[row] - given[row].max()).exp().sum().item()
        assert sums[row].item() == pytest.approx(expected, rel=LONG_SUM)
    assert columns == 1 or (logits[1, columns // 2 :] == 0).all()
    assert (logits[2] / sums[2]).isnan().all()


def assert_causal_attention(
    length: int, size: int, dtype: torch.dtype, *, batch: int = 2, heads: int = 3, most: float = IN_FLOAT32
) -> None:
    """Of views, as QKV's output gives them."""
    made = torch.randn(length, batch, heads, 3, size).to(dtype)
    qkv = [made[:, :, :, part].permute(1, 2, 0, 3) for part in range(3)]
    grad = torch.randn(length, batch, heads, size).to(dtype).permute(1, 2, 0, 3)
    assert cpu_kernels.can_take_attention(*qkv)
    own = gradients(lambda q, k, v: attention(q, k, v, scale=0.3, is_causal=True), qkv, grad)
    plain = partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3)
    for made, right in zip(own, gradients(plain, [x.double() for x in qkv], grad), strict=True):
        assert made.dtype == dtype
        assert_rounded(made, right, SUMMED if length > 1 else OF_FEW, in_float32=most)


ATTENTIONS = [(1, 16), (100, 18), (300, 64), (515, 16)]
"""Beyond a block of queries and one of keys, whole and in part; heads that are a vector, less and more."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("length", "size"), ATTENTIONS)
def test_causal_attention_and_its_gradients(kernels: None, length: int, size: int, dtype: torch.dtype) -> None:
    assert_causal_attention(length, size, dtype)


def test_long_sums_keep_what_is_added(kernels: None) -> None:
    """Over keys and queries; a single float32 sum of as many terms is beyond the bound."""
    assert_causal_attention(4096, 16, torch.float32, batch=1, heads=1, most=LONG_ATTENTION)


def test_what_they_cannot_take_is_left_to_pytorch(kernels: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    bf16 = torch.ones(2, 4, dtype=torch.bfloat16)
    assert cpu_kernels.can_take(bf16, torch.nn.Parameter(bf16))
    with FakeTensorMode() as mode:
        assert not cpu_kernels.can_take(mode.from_tensor(bf16))
    for other in (bf16.float(), bf16.half(), bf16.t(), bf16.to("meta")):
        assert not cpu_kernels.can_take(bf16, other)
    heads = torch.ones(2, 3, 5, 4, dtype=torch.bfloat16)
    assert cpu_kernels.can_take_attention(heads, heads, heads)
    assert not cpu_kernels.can_take_attention(heads, heads[:, :1], heads[:, :1])  # groups of queries
    assert not cpu_kernels.can_take_attention(*[heads[..., :3]] * 3)  # a half word


def test_they_are_built_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (built,) = library.iterdir()
    assert built.suffix == ".so"  # and nothing of its making is left
    monkeypatch.setattr(cpu_kernels.subprocess, "run", lambda *_, **__: pytest.fail("a compiler was started"))
    assert cpu_kernels.load(library) is None
    cpu_kernels.unload("the test is over")


def no_compiler(monkeypatch: pytest.MonkeyPatch, _folder: Path) -> None:
    monkeypatch.setenv("PATH", "")


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    write_program(folder / "g++", "echo 'error: no such option' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(cpu_kernels, "COMPILERS", ("g++",))


@pytest.mark.parametrize(
    ("planted", "part"),
    [
        (no_compiler, "no C++ compiler is found (c++, g++, clang++)"),
        (a_compiler_that_fails, "(error: no such option)"),
    ],
)
def test_without_them_it_is_said_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Any, part: str) -> None:
    planted(monkeypatch, tmp_path)
    problem = cpu_kernels.load(tmp_path / "cache")
    assert problem is not None and part in problem
    assert cpu_kernels.problem() == problem
    assert not cpu_kernels.can_take(torch.ones(2, dtype=torch.bfloat16))
    assert not list((tmp_path / "cache").glob("*"))  # nothing half-made, nor a folder for nothing
