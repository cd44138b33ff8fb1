"""The FAN activation's inputs, its results in float64, and the distance of a form's results from them."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fanformer.ops.fan_activation import Implementation

# Units in the last place. A float32 result may be off by the kernel's three (its polynomials and its reduction), which
# no narrower type sees but where it decides a rounding; PyTorch's own functions stay below them too.
FLOAT32_UNITS = 3.0
ROUNDED_UNITS = 0.51
# grad_p is a difference of two products; each of the three is rounded in float32, in units of the largest of them.
GRADIENT_UNITS = {torch.float32: 2.0, torch.bfloat16: 0.51, torch.float16: 0.51}
# gelu and its slope against float64: absolute, of values around 1, plus the rounding of the type.
GELU_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
TYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """An output's sizes on one rank, and the ranks."""

    ranks: int
    periodic: int
    linear: int
    tokens: int

    @property
    def width(self) -> int:
        return self.ranks * (2 * self.periodic + self.linear)

    def canonical(self, ntx: Tensor) -> Tensor:
        return ntx.flatten(1)


# Plain, several ranks, either kind missing, more columns than a tile has, more tokens than a tile has, a single one.
CASES = [
    Case(1, 5, 9, 37),
    Case(2, 3, 4, 11),
    Case(3, 16, 8, 5),
    Case(1, 0, 6, 7),
    Case(2, 6, 0, 7),
    Case(1, 130, 200, 19),
    Case(2, 1, 3, 600),
    Case(1, 64, 128, 1),
]


def units(actual: Tensor, exact: Tensor, scale: Tensor | None = None) -> float:
    """The greatest distance, in units in the last place of the exact value (or of `scale`) in the type of `actual`."""
    limits = torch.finfo(actual.dtype)
    fraction, exponent = torch.frexp((exact if scale is None else scale).double())
    place = torch.where(fraction == 0, 0.0, torch.ldexp(torch.ones_like(fraction), exponent - 1))
    distance = (actual.double() - exact).abs() / (place.clamp_min(limits.tiny) * limits.eps)
    return float(distance.max()) if distance.numel() else 0.0


def phases(case: Case, dtype: torch.dtype, largest: float, seed: int = 0) -> Tensor:
    """p | g of every rank [t, n, r], the phases up to `largest`, a part of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(case.ranks, case.tokens, case.periodic + case.linear + 3, generator=generator)
    wide[..., 2 : 2 + case.periodic] = wide[..., 2 : 2 + case.periodic].sin() * largest
    return wide.to(dtype)[..., 2:-1]


def exact_output(pre_tnr: Tensor, case: Case, gelu: bool) -> Tensor:
    """[cos p, sin p, g] in float64."""
    p, g = pre_tnr.double().transpose(0, 1).split([case.periodic, case.linear], dim=-1)
    g = torch.nn.functional.gelu(g) if gelu else g
    return torch.cat([p.cos().flatten(1), p.sin().flatten(1), g.flatten(1)], dim=-1)


def check_output(form: Implementation, case: Case, dtype: torch.dtype, gelu: bool, largest: float = 100.0) -> None:
    pre_tnr = phases(case, dtype, largest)
    # Written in float32 and rounded here: Triton's interpreter cuts bfloat16 off where a GPU rounds.
    x_f = torch.full((case.tokens, case.width), torch.nan)
    g = form.activate(pre_tnr, x_f, case.periodic, gelu)
    assert (g is not None) == gelu
    if g is not None:
        assert torch.equal(g, pre_tnr[..., case.periodic :].transpose(0, 1).flatten(1))
    exact, periodic = exact_output(pre_tnr, case, gelu), 2 * case.ranks * case.periodic
    allowed = FLOAT32_UNITS if dtype == torch.float32 else ROUNDED_UNITS
    assert units(x_f[:, :periodic].to(dtype), exact[:, :periodic]) <= allowed
    tolerance = GELU_ERROR[dtype] if gelu else 0.0
    torch.testing.assert_close(
        x_f[:, periodic:].to(dtype).double(), exact[:, periodic:], atol=tolerance, rtol=tolerance
    )


def check_gradient(
    form: Implementation, case: Case, dtype: torch.dtype, gelu: bool, strided: str = "contiguous"
) -> None:
    x_f = exact_output(phases(case, dtype, 100.0), case, False).to(dtype)
    grad = strided_gradient(case, dtype, strided)
    g = x_f[:, 2 * case.ranks * case.periodic :].contiguous() if gelu else None
    wide = torch.full((case.ranks, case.tokens, case.periodic + case.linear + 3), torch.nan)
    part = wide[..., 2:-1]
    form.differentiate(x_f, grad, g, part, case.periodic)
    assert wide[..., :2].isnan().all() and wide[..., -1].isnan().all()
    p_all, g_all = case.ranks * case.periodic, case.ranks * case.linear
    cos, sin, _ = x_f.double().split([p_all, p_all, g_all], dim=-1)
    grad_cos, grad_sin, grad_g = grad.double().split([p_all, p_all, g_all], dim=-1)
    actual_p, actual_g = part.to(dtype).transpose(0, 1).split([case.periodic, case.linear], dim=-1)
    exact = grad_sin * cos - grad_cos * sin
    largest = torch.stack([exact, grad_sin * cos, grad_cos * sin]).abs().amax(0)
    assert units(actual_p.flatten(1), exact, largest) <= GRADIENT_UNITS[dtype]
    if g is not None:
        grad_g = torch.ops.aten.gelu_backward(grad_g, g.double())
    tolerance = GELU_ERROR[dtype] if gelu else 0.0
    torch.testing.assert_close(actual_g.flatten(1).double(), grad_g, atol=tolerance, rtol=tolerance)


def strided_gradient(case: Case, dtype: torch.dtype, strided: str) -> Tensor:
    """A gradient [n, w] as autograd may hand it over."""
    shape, generator = (case.tokens, case.width), torch.Generator().manual_seed(1)
    if strided == "expanded":
        return torch.randn(1, 1, generator=generator).to(dtype).expand(shape)
    if strided == "transposed":
        return torch.randn(shape[::-1], generator=generator).to(dtype).T
    if strided == "rows far apart":
        storage = torch.empty(case.tokens << 21, dtype=dtype)
        return storage.as_strided(shape, (1 << 21, 1)).copy_(torch.randn(shape, generator=generator))
    return torch.randn(shape, generator=generator).to(dtype)


STRIDES = ["expanded", "transposed", "rows far apart"]


def check_large_phases(form: Implementation, largest: float) -> None:
    """float32 phases of that size, those nearest to quarter turns too, where cos or sin is next to 0."""
    quarter = torch.pi / 2
    step = max(1.0, largest // (8000 * quarter))
    near = (torch.arange(1, 8001, dtype=torch.float64) * step * quarter).float()
    near = near[near <= largest]
    spread = torch.linspace(-largest, largest, 5000)
    values = torch.cat([torch.tensor([0.0, -0.0, 1e-30]), near, -near, torch.nextafter(near, torch.zeros(())), spread])
    case = Case(2, 128, 3, len(values) // 256)
    pre_tnr = values[: case.tokens * 256].view(2, case.tokens, 128)
    pre_tnr = torch.cat([pre_tnr, torch.zeros(2, case.tokens, case.linear)], dim=-1)
    x_f = torch.empty(case.tokens, case.width)
    form.activate(pre_tnr, x_f, case.periodic, False)
    exact = exact_output(pre_tnr, case, False)
    assert units(x_f, exact) <= FLOAT32_UNITS
    assert units(x_f.bfloat16(), exact) <= ROUNDED_UNITS


def check_no_number(form: Implementation) -> None:
    """What is not finite becomes NaN, and nothing else does."""
    pre_tnr = torch.tensor([1.0, torch.nan, 2.0, torch.inf, -torch.inf, 1e38]).view(1, 1, -1)
    x_f = torch.empty(1, 12)
    form.activate(pre_tnr, x_f, 6, False)
    assert x_f.isnan().tolist() == [[False, True, False, True, True, False] * 2]


def differing_share(form: Implementation, reference: Implementation, dtype: torch.dtype) -> float:
    """Of all normal numbers of a 16-bit type, how many get another cos or sin as phases; none by more than a unit."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    # Triton's interpreter reads bfloat16's subnormal numbers wrongly.
    values = values[values.isfinite() & (values.abs() >= torch.finfo(dtype).tiny)]
    values = values[values.abs().argsort()]  # tiles without large phases, and tiles with them
    case = Case(1, 128, 0, len(values) // 128)
    made = [torch.empty(case.tokens, case.width) for _ in range(2)]
    for one, x_f in zip((form, reference), made, strict=True):
        one.activate(values.view(1, -1, 128), x_f, case.periodic, False)
    first, second = (x_f.to(dtype) for x_f in made)
    assert units(first, second.double()) <= 1.0
    return float((first != second).double().mean())
