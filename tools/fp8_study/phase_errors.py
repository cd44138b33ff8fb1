"""Errors of a FAN map's phases, of their cos and sin, and of what QKV reads, against float64.

[p | g] = W x + b is computed in bf16 and in FP8 from the same inputs. Both factors of an FP8 product are rounded to
e4m3, so each of a phase's h products w_k x_k is off by a random relative error. Independent errors add up to

    rms(δp) = ε √2 · √(Σ_k (w_k x_k)²)        ε: rms relative error of one rounding

which does not depend on the sum p itself, and cos p moves by δp · |sin p|. Were they aligned, all products off by the
same relative error of 2^-4 (e4m3's largest), δp would be |p| · 2^-4. The tables have both formulas.

Shapes: n tokens, h hidden size, P periodic rows, r = P + G rows of the map.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max
E4M3_HALF_ULP = 2.0**-4  # relative to a number that is a power of two: the largest error of a rounding
# The rms of one rounding's relative error: 2^-3 m^-1 / √12 for a mantissa m in [1, 2), whose logarithm is spread evenly
# (Benford's law): the mean of m^-2 is then 3 / (8 ln 2).
E4M3_RMS = 2.0**-3 / math.sqrt(12.0) * math.sqrt(3.0 / (8.0 * math.log(2.0)))

EDGES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
"""Of the bins of |p|."""

Row = dict[str, float]


class FANMap(NamedTuple):
    """One layer's FAN map, with its norm, and one batch through it."""

    hidden_nh: Tensor
    """Its input, before the norm."""
    norm_h: Tensor
    epsilon: float
    weight_rh: Tensor
    bias_r: Tensor
    periodic: int
    """P: the first rows, which are phases."""
    computed_nr: Tensor
    """p | g as the run itself computed it."""


def e4m3(tensor: Tensor) -> Tensor:
    """Rounded to e4m3 with one scale for the tensor, as the recipe `tensorwise` does; in float32."""
    scale = E4M3_LARGEST / tensor.float().abs().amax()
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() * (1.0 / scale)


def normed(layer: FANMap, dtype: torch.dtype) -> Tensor:
    """The map's input x [n, h] after its norm, computed in `dtype`."""
    hidden = layer.hidden_nh.to(dtype)
    return hidden * (hidden.square().mean(-1, keepdim=True) + layer.epsilon).rsqrt() * layer.norm_h.to(dtype)


def exact(layer: FANMap) -> Tensor:
    """p | g [n, r] in float64."""
    return normed(layer, torch.float64) @ layer.weight_rh.double().t() + layer.bias_r.double()


def in_fp8(layer: FANMap) -> Tensor:
    """p | g [n, r] as `precision.fp8_fan` makes it under the recipe `tensorwise`, rounded to bf16 as it is there."""
    x_nh = normed(layer, torch.float32).bfloat16()
    return (e4m3(x_nh) @ e4m3(layer.weight_rh).t() + layer.bias_r.float()).bfloat16()


def expected_error(layer: FANMap) -> Tensor:
    """rms(δp) [n, P] of an FP8 map by the formula for independent errors."""
    squares = normed(layer, torch.float64).square() @ layer.weight_rh[: layer.periodic].double().square().t()
    return E4M3_RMS * (2.0 * squares).sqrt()


def errors_by_phase(phase: Tensor, computed: Tensor, expected: Tensor) -> list[Row]:
    """One row for each bin of |p|: how many phases it has, and their errors as root mean squares.

    Args:
        phase: exact, in float64.
        computed: the same phases with errors.
        expected: δp of each by the formula for independent errors.
    """
    error = computed.double() - phase
    columns = {
        "phase": error,
        "cos": computed.double().cos() - phase.cos(),
        "sin": computed.double().sin() - phase.sin(),
        "expected_phase": expected,
        "expected_cos": expected * phase.sin(),
        "half_ulp_phase": phase * E4M3_HALF_ULP,
    }
    rows = []
    for low, high in itertools.pairwise(EDGES):
        inside = (phase.abs() >= low) & (phase.abs() < high)
        count = int(inside.sum())
        row: Row = {"from": low, "count": count, "share": count / phase.numel()}
        if count:
            row.update({name: _rms(values[inside]) for name, values in columns.items()})
        rows.append(row)
    return rows


def x_f(pre_nr: Tensor, periodic: int) -> Tensor:
    """X_F = [cos p, sin p, g] of p | g, in its type."""
    phase, linear = pre_nr[:, :periodic], pre_nr[:, periodic:]
    phase = phase.to(torch.promote_types(phase.dtype, torch.float32))  # as the layer does
    return torch.cat([phase.cos().to(pre_nr.dtype), phase.sin().to(pre_nr.dtype), linear], -1)


def qkv_input_errors(layer: FANMap, pre_nr: Tensor) -> Row:
    """What FP8 makes of QKV's input by its own, and together with the error of the map that made it.

    Args:
        pre_nr: p | g in bf16, by a map in either format.
    """
    x_f_nh = x_f(pre_nr, layer.periodic)
    rounded, exactly = e4m3(x_f_nh).double(), x_f(exact(layer), layer.periodic)
    trigonometric = 2 * layer.periodic
    difference = rounded - x_f_nh.double()
    return {
        "largest": x_f_nh.abs().amax().item(),  # takes the scale
        "cos_sin": _rms(difference[:, :trigonometric]),  # of the quantisation alone
        "linear": _rms(difference[:, trigonometric:]),
        "relative": _relative(rounded, x_f_nh.double()),
        "relative_with_map": _relative(rounded, exactly),
    }


def plain_input_error(layer: FANMap) -> float:
    """The relative error of the normed x in e4m3, which is what QKV of a Transformer reads."""
    x_nh = normed(layer, torch.float32).bfloat16()
    return _relative(e4m3(x_nh).double(), x_nh.double())


def measure(layers: Sequence[FANMap], *, is_fp8: bool) -> dict[str, list[Row] | Row]:
    """The tables of all layers of a model together, for its own map and, if that is bf16, for an FP8 map in its place.

    Args:
        is_fp8: whether the run's own map is in FP8.
    """
    maps: dict[str, Callable[[FANMap], Tensor]] = {"fp8" if is_fp8 else "bf16": lambda layer: layer.computed_nr}
    if not is_fp8:
        maps["fp8"] = in_fp8
    phases = [exact(layer)[:, : layer.periodic] for layer in layers]
    expected = torch.cat([expected_error(layer) for layer in layers])
    found: dict[str, list[Row] | Row] = {
        "phases": {
            "largest": max(phase.abs().amax().item() for phase in phases),
            "rms": _rms(torch.cat(phases)),
            "plain_input_relative": _mean([plain_input_error(layer) for layer in layers]),
        }
    }
    for name, computed in maps.items():
        made = [computed(layer) for layer in layers]
        own = torch.cat([pre_nr[:, : layer.periodic] for pre_nr, layer in zip(made, layers, strict=True)])
        inputs = [qkv_input_errors(layer, pre_nr) for pre_nr, layer in zip(made, layers, strict=True)]
        found[f"{name}_errors"] = errors_by_phase(torch.cat(phases), own, expected)
        found[f"{name}_qkv_input"] = {key: _mean([row[key] for row in inputs]) for key in inputs[0]}
    return found


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _relative(computed: Tensor, wanted: Tensor) -> float:
    return ((computed - wanted).norm() / wanted.norm()).item()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
