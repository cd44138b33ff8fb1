"""Measures the errors of long sums in float32, by length: this project's kernels for each instruction set, and PyTorch.

    python tools/kernel_errors.py

One line a sum and length: errors relative to float64 of the kernels built for older CPUs (x86-64-v3: AVX2), for
AVX-512 without units for bf16 (x86-64-v4, where this CPU has it) and for this CPU, and of PyTorch's operations here. Of
the loss head's sum of exponentials it is the largest of any row's, with the mean in brackets; of everything else the
error's norm over the result's. Triton's sum cannot run here: its order on a GPU is imitated in float32.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.ops.attention import attention
from megatron_fanformer.ops.cross_entropy import exponentials, exponentials_in_torch
from megatron_fanformer.ops.cross_entropy_triton import BLOCK, WARPS
from megatron_fanformer.ops.norms import norm

MACHINES = ("x86-64-v3", "x86-64-v4", "native")
ROWS = 64
THREADS_OF_A_WARP = 32

Errors = dict[str, str]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    machines = [name for name in MACHINES if name != "x86-64-v4" or torch.cpu._is_avx512_supported()]
    print("| sum | over |", " | ".join([*machines, "PyTorch"]), "|")
    print("|---|--:|" + "--:|" * (len(machines) + 1))
    with tempfile.TemporaryDirectory() as cache:
        libraries = {name: _built(name, Path(cache)) for name in machines}
        for title, measure, lengths in MEASURES:
            for length in lengths:
                errors = {}
                for name, library in {**libraries, "PyTorch": None}.items():
                    torch.manual_seed(0)
                    cpu_kernels._library = library
                    errors[name] = measure(length)
                print(f"| {title} | {length:,} |", " | ".join(errors.values()), "|")
    for columns in (50_304, 151_936):
        print(f"Triton's order, {columns:,} columns: {_in_tritons_order(columns)}")


def _built(machine: str, cache: Path) -> object:
    options = cpu_kernels.OPTIONS
    cpu_kernels.OPTIONS = (*options, f"-march={machine}")
    try:
        if problem := cpu_kernels.load(cache):
            sys.exit(problem)
        return cpu_kernels._library
    finally:
        cpu_kernels.OPTIONS = options
        cpu_kernels.unload("measured one after the other")


def _relative(made: Tensor, exact: Tensor) -> str:
    return f"{((made.double() - exact).norm() / exact.norm()).item():.1e}"


def _of_rows(sums: Tensor, exact: Tensor) -> str:
    errors = (sums.double() - exact) / exact
    return f"{errors.abs().max().item():.1e} ({errors.mean().item():+.0e})"


def _logits(columns: int) -> tuple[Tensor, Tensor]:
    """Of a trained model's spread, and the sum of their exponentials relative to the largest, in float64."""
    logits = 5 * torch.randn(ROWS, columns)
    below = logits.double() - logits.amax(-1, keepdim=True).double()
    return logits, below.exp().sum(-1)


def _softmax(columns: int) -> str:
    logits, exact = _logits(columns)
    return _of_rows((exponentials if cpu_kernels._library else exponentials_in_torch)(logits)[1], exact)


def _rms_norm(width: int) -> str:
    x, weight = torch.randn(ROWS, width), torch.ones(width)
    exact = x.double() * x.double().square().mean(-1, keepdim=True).rsqrt()
    return _relative(
        cpu_kernels.rms_norm(x, weight, 0.0)[0] if cpu_kernels._library else F.rms_norm(x, (width,)), exact
    )


def _rms_norm_weight(rows: int) -> str:
    x, grad = torch.randn(2, rows, 64)
    grad, weight = grad + x, torch.ones(64, requires_grad=True)
    factors = x.double().square().mean(-1, keepdim=True).rsqrt()
    exact = (grad.double() * x.double() * factors).sum(0)
    if cpu_kernels._library:
        _, own = cpu_kernels.rms_norm(x, weight.detach(), 0.0)
        return _relative(cpu_kernels.rms_norm_backward(x, weight.detach(), own, grad)[1], exact)
    F.rms_norm(x, (64,), weight, 0.0).backward(grad)
    return _relative(weight.grad, exact)


def _attention(keys: int) -> str:
    """What is seen, and the gradients of queries, keys and values."""

    def passes(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    *qkv, grad = torch.randn(4, 1, 1, keys, 64)
    made = passes(lambda *each: attention(*each, scale=0.125, is_causal=True), *(each.clone() for each in qkv))
    plain = lambda *each: F.scaled_dot_product_attention(*each, scale=0.125, is_causal=True)  # noqa: E731
    exact = passes(plain, *(each.double() for each in qkv))
    return " ".join(_relative(own, right) for own, right in zip(made, exact, strict=True))


def _weight_gradient(tokens: int) -> str:
    """In bf16, added to a float32 sum: PyTorch's is a product in float32."""
    grad, x = torch.randn(2, tokens, 64).bfloat16()
    sums = torch.zeros(64, 64)
    if cpu_kernels._library:
        cpu_kernels.add_product(sums, grad, x)
    else:
        sums.addmm_(grad.float().t(), x.float())
    return _relative(sums, grad.double().t() @ x.double())


def _norm(numbers: int) -> str:
    """Not a kernel, and the same for all of them: `ops/norms.py` beside torch's own."""
    x = torch.randn(numbers)
    made = norm(x) if cpu_kernels._library else x.norm()
    return f"{abs(made.item() / x.double().norm().item() - 1):.1e}"


def _in_tritons_order(columns: int) -> str:
    """Each thread adds its part of a block one by one, then threads by halves, then blocks one by one."""
    logits, exact = _logits(columns)
    terms = (logits - logits.amax(-1, keepdim=True)).exp()
    threads = WARPS * THREADS_OF_A_WARP
    blocks = F.pad(terms, (0, -columns % BLOCK)).view(ROWS, -1, BLOCK // threads, threads)
    parts = blocks[:, :, 0]
    for step in range(1, blocks.shape[2]):
        parts = parts + blocks[:, :, step]
    while parts.shape[-1] > 1:
        parts = parts.unflatten(-1, (2, -1)).sum(-2)
    total = torch.zeros(ROWS)
    for block in range(parts.shape[1]):
        total = total + parts[:, block, 0]
    return _of_rows(total, exact)


MEASURES: tuple[tuple[str, Callable[[int], str], tuple[int, ...]], ...] = (
    ("loss head's exponentials: columns", _softmax, (5_000, 50_304, 151_936)),
    ("RMSNorm: width", _rms_norm, (512, 4_096, 16_384)),
    ("RMSNorm, gradient of the weight: rows", _rms_norm_weight, (2_048, 16_384, 131_072)),
    ("causal attention and its gradients: keys", _attention, (512, 2_048, 8_192)),
    ("weight gradients: tokens", _weight_gradient, (2_048, 16_384, 65_536)),
    ("gradient norm: numbers", _norm, (100_000, 1_000_000, 25_000_000)),
)

if __name__ == "__main__":
    main()
