"""Errors of a FAN map's phases, of their cos and sin, against float64; and a training with them.

[p | g] = W x + b is computed in bf16 and in FP8 from the same inputs. Both factors of an FP8 product are rounded to
e4m3, so each of a phase's h products w_k x_k is off by a random relative error. Independent errors add up to

    rms(δp) = ε √2 · √(Σ_k (w_k x_k)²)        ε: rms relative error of one rounding

which does not depend on the sum p itself, and cos p moves by δp · |sin p|.

Shapes: n tokens, h hidden size, P periodic rows, r = P + G rows of the map.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The rms of one rounding's relative error: 2^-3 m^-1 / √12 for a mantissa m in [1, 2), whose logarithm is spread evenly
# (Benford's law): the mean of m^-2 is then 3 / (8 ln 2).
E4M3_RMS = 2.0**-3 / math.sqrt(12.0) * math.sqrt(3.0 / (8.0 * math.log(2.0)))
VALIDATION, ENGINE = "held-out", "transformer_engine"
EDGES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
"""Of the bins of |p|."""


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
    """Round to e4m3 with one scale for the tensor, as the recipe `tensorwise` does; in float32."""
    scale = E4M3_LARGEST / tensor.float().abs().amax()
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() * (1.0 / scale)


def normed(layer: FANMap, dtype: torch.dtype) -> Tensor:
    """Return the map's input x [n, h] after its norm, computed in `dtype`."""
    hidden = layer.hidden_nh.to(dtype)
    return hidden * (hidden.square().mean(-1, keepdim=True) + layer.epsilon).rsqrt() * layer.norm_h.to(dtype)


def exact(layer: FANMap) -> Tensor:
    """Return p | g [n, r] in float64."""
    return normed(layer, torch.float64) @ layer.weight_rh.double().t() + layer.bias_r.double()


def in_fp8(layer: FANMap) -> Tensor:
    """Return p | g [n, r] as `precision.fp8_fan` makes it under `tensorwise`, rounded to bf16 as it is there."""
    x_nh = normed(layer, torch.float32).bfloat16()
    return (e4m3(x_nh) @ e4m3(layer.weight_rh).t() + layer.bias_r.float()).bfloat16()


def expected_error(layer: FANMap) -> Tensor:
    """Return rms(δp) [n, P] of an FP8 map by the formula for independent errors."""
    squares = normed(layer, torch.float64).square() @ layer.weight_rh[: layer.periodic].double().square().t()
    return E4M3_RMS * (2.0 * squares).sqrt()


def errors_by_phase(phase: Tensor, computed: Tensor, expected: Tensor) -> list[dict[str, float]]:
    """Return a row for each bin of |p|: the number of phases, and their errors as root mean squares.

    Args:
        phase: exact, in float64.
        computed: the same phases with errors.
        expected: δp of each by the formula for independent errors.
    """
    columns = {
        "phase": computed.double() - phase,
        "cos": computed.double().cos() - phase.cos(),
        "sin": computed.double().sin() - phase.sin(),
        "expected_phase": expected,
    }
    rows = []
    for low, high in itertools.pairwise(EDGES):
        inside = (phase.abs() >= low) & (phase.abs() < high)
        count = int(inside.sum())
        errors = {name: _rms(values[inside]) for name, values in columns.items()} if count else {}
        rows.append({"count": count, "share": count / phase.numel(), **errors})
    return rows


def measure(layers: Sequence[FANMap], *, is_fp8: bool) -> dict[str, Any]:
    """Return the errors of all layers of a model, by its own map and, if that is bf16, by an FP8 map in its place."""
    maps = {"fp8": [layer.computed_nr for layer in layers]}
    if not is_fp8:
        maps = {"bf16": maps["fp8"], "fp8": [in_fp8(layer) for layer in layers]}
    phases = torch.cat([exact(layer)[:, : layer.periodic] for layer in layers])
    expected = torch.cat([expected_error(layer) for layer in layers])
    errors: dict[str, Any] = {"rms": _rms(phases)}
    for name, made in maps.items():
        computed = torch.cat([pre_nr[:, : layer.periodic] for pre_nr, layer in zip(made, layers, strict=True)])
        errors[name] = errors_by_phase(phases, computed, expected)
    return errors


def train(values: dict[str, Any]) -> dict[str, Any]:
    """On the rank: run a configuration; return its losses, and the errors of its phases before and after."""
    from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.train.config import config_from_dict
    from megatron_fanformer.train.metrics import read_metrics
    from megatron_fanformer.train.trainer import Trainer

    config = config_from_dict(values)
    steps = values["training"]["train_iters"]
    with rank_grid(config.parallel, "cuda") as grid:
        trainer = Trainer(config, grid)
        try:
            # Where the Engine's layers are: the norm is a part of the map there.
            is_watched = config.model.has_fan and config.kernels.transformer_impl == ENGINE
            phases = {0: observe(trainer)} if is_watched else {}
            while trainer.step < steps:
                trainer.take_step()
            phases |= {steps: observe(trainer)} if is_watched else {}
        finally:
            trainer.close()
    metrics = read_metrics(Path(config.training.run_dir))
    return {
        "losses": [entry["loss"] for entry in metrics],
        "validation": metrics[-1][f"{VALIDATION_LOSS}/{VALIDATION}"],
        "phases": {str(step): errors for step, errors in phases.items()},
    }


def observe(trainer: Any) -> dict[str, Any]:
    """Return the errors of all layers' phases over the first validation batch."""
    from megatron_fanformer.train.evaluation import evaluate_loss

    seen: list[FANMap] = []

    def recorder(fan: Any) -> Any:
        def record(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
            tensors = (inputs[0].flatten(0, 1), linear.layer_norm_weight, linear.weight, linear.bias, output[0])
            hidden, norm, weight, bias, computed = (tensor.detach().cpu().clone() for tensor in tensors)
            (rows,) = fan.shard.outputs
            seen.append(FANMap(hidden, norm, linear.eps, weight, bias, rows.periodic, computed.flatten(0, 1)))

        return record

    maps = [layer.self_attention.fan for layer in trainer._stages[0].decoder.layers]
    handles = [fan.linear.register_forward_hook(recorder(fan)) for fan in maps]
    evaluate_loss(trainer._wrapped, trainer._data.valid[VALIDATION], trainer.grid, trainer.config, eval_iters=1)
    for handle in handles:
        handle.remove()
    return measure(seen, is_fp8=trainer.config.precision.fp8_fan)


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()
