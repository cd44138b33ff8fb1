"""Measures Lipschitz constants of random models by depth: the largest ‖f(x + e) − f(x)‖ / ‖e‖ over a few inputs.

The models and the order of random numbers are those of the authors' notebook (Calculate_Lipschitz.ipynb): convolutions
with batch norm, a Transformer with its norm after the sum, and the same with a FAN layer before queries, keys and
values. The notebook swaps two axes, so that attention runs among the heads of one point. The inputs' distance, 1e-7, is
near float32's rounding: float64 is measured, too.

Shapes: b inputs, s points, h width, n heads, c channels (h), y and x sides of the grid.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fanformer.experiments.intervals import ratio_mean
from megatron_fanformer.experiments.probe import LipschitzSettings
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.experiments.twins import FFN_RATIO, FANLayer

MODELS = ("MLP", "Transformer", "FANformer")
PRINTED = {  # the constants of MODELS by depth, as the notebook prints them for its settings and seed 0
    1: (4.1372, 4.5026, 6.1521),
    2: (7.0347, 7.3858, 11.2465),
    4: (12.3073, 13.0271, 24.0606),
    8: (21.8128, 25.6761, 103.6567),
    12: (30.3452, 51.2796, 407.3611),
    16: (38.2069, 79.7350, 1439.2750),
    24: (53.3033, 225.3611, 16732.4648),
}
GAIN = math.sqrt(2.0)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
PAPER = "FANformer above the Transformer, by 27.3% in deep configurations"

Constants = dict[tuple[str, str], list[float]]  # by model and number format: a constant for each depth


def measure(settings: LipschitzSettings, _folder: Path, log: Log) -> Measured:
    """Measure the constants of the notebook's models with every seed."""
    by_seed = [constants(settings, seed, log) for seed in range(settings.seeds)]
    rows: list[list[Cell]] = []
    for depth_index, depth in enumerate(settings.depths):
        for model_index, model in enumerate(MODELS):
            printed = PRINTED[depth][model_index] if depth in PRINTED else None
            rows.append([depth, model, printed, *(by_seed[0][model, dtype][depth_index] for dtype in DTYPES)])
    table = Table(title="Constants of seed 0", columns=["layers", "model", "the notebook's own", *DTYPES], rows=rows)
    return Measured(findings=list(_findings(settings, by_seed)), tables=[table])


# -- the notebook's models


class _Block(nn.Module):
    """A layer [b, s, h] -> [b, s, h]. New maps draw random weights: they are created in the notebook's order."""

    def __init__(self, settings: LipschitzSettings, *, has_fan: bool) -> None:
        super().__init__()
        size = settings.hidden_size
        self.num_heads = settings.num_heads
        self.query, self.key, self.value = (
            nn.Sequential(*([FANLayer(size)] if has_fan else []), nn.Linear(size, size)) for _ in range(3)
        )
        self.out = nn.Linear(size, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(size, FFN_RATIO * size), nn.ReLU(), nn.Linear(FFN_RATIO * size, size))

    def forward(self, x_bsh: Tensor) -> Tensor:
        b, s, h = x_bsh.shape
        query, key, value = (
            project(x_bsh).view(b, s, self.num_heads, -1) for project in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(2, 3) / math.sqrt(h)).softmax(-1)  # [b, s, n, n]: among the heads of a point
        x_bsh = self.norms[0](self.out((weights @ value).reshape(b, s, h)) + x_bsh)
        return self.norms[1](self.ffn(x_bsh) + x_bsh)


class _Convolutions(nn.Module):
    """The notebook's MLP block [b, c, y, x] -> [b, c, y, x]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Conv2d(size, size, kernel_size=3, padding=1, bias=False) for _ in range(2))

    def forward(self, x_bcyx: Tensor) -> Tensor:
        batch_norm = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
        return batch_norm(self.maps[1](batch_norm(self.maps[0](x_bcyx)).relu())) + x_bcyx


def _models(settings: LipschitzSettings, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models of one depth with their names, in the order in which the notebook draws their weights."""
    for name in ("Transformer", "MLP", "FANformer"):
        if name == "MLP":
            yield name, nn.Sequential(*(_Convolutions(settings.hidden_size) for _ in range(depth)))
            continue
        model = nn.Sequential(*(_Block(settings, has_fan=name == "FANformer") for _ in range(depth)))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=GAIN)
                nn.init.zeros_(module.bias)
        yield name, model


# -- the measurement


@torch.no_grad()
def constants(settings: LipschitzSettings, seed: int, log: Log) -> Constants:
    """Measure the constants of the models of one seed, in both number formats."""
    measured: Constants = {(model, dtype): [] for model in MODELS for dtype in DTYPES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = (settings.samples, settings.hidden_size, settings.grid, settings.grid)
        x_bcyx = torch.randn(shape)
        difference_bcyx = settings.epsilon * torch.randn(shape)
        for depth in settings.depths:
            for name, model in _models(settings, depth):
                for dtype_name, dtype in DTYPES.items():
                    inputs = x_bcyx.to(dtype), x_bcyx.to(dtype) + difference_bcyx.to(dtype)
                    measured[name, dtype_name].append(_constant(model.to(dtype), *inputs))
                figures = " and ".join(f"{measured[name, dtype][-1]:.4f} in {dtype}" for dtype in DTYPES)
                log(f"seed {seed}, {depth} layers: {name} {figures}")
    return measured


def _constant(model: nn.Module, first_bcyx: Tensor, second_bcyx: Tensor) -> float:
    """Return the largest ratio, over the inputs, of the distance of two outputs to the distance of their two inputs.

    All inputs enter at once, as in the notebook, since float32's rounding of a product depends on the product's size.
    """
    distances_b = (second_bcyx - first_bcyx).flatten(1).norm(dim=1)
    inputs = [first_bcyx, second_bcyx]
    if isinstance(model[0], _Block):  # type: ignore[index]
        inputs = [x_bcyx.flatten(2).transpose(1, 2) for x_bcyx in inputs]  # [b, s, h]
    first, second = map(model, inputs)
    output_distances_b = (second - first).flatten(1).norm(dim=1)
    return (output_distances_b / distances_b).max().item()


# -- findings


def _findings(settings: LipschitzSettings, by_seed: Sequence[Constants]) -> Iterator[Finding]:
    """Yield ratios of constants at the largest depth: FANformer to Transformer, then FANformer float32 to float64."""
    depth = settings.depths[-1]
    for dtype in DTYPES:
        ratios = [measured["FANformer", dtype][-1] / measured["Transformer", dtype][-1] for measured in by_seed]
        ours, interval = ratio_mean(ratios)
        spread = "" if interval is None else f", {interval[0]:.3g} to {interval[1]:.3g} over {len(ratios)} seeds"
        yield Finding(
            name=f"constant at {depth} layers, FANformer over Transformer, {dtype}",
            paper=PAPER,
            ours=ours,
            interval=interval,
            unit="ratio",
            shows=None if interval is None else interval[0] > 1,
            sentence=f"In {dtype} the FANformer spreads near inputs {ours:.3g} times as far as the Transformer at "
            f"{depth} layers of random weights{spread}.",
        )
    largest = max(measured["FANformer", "float32"][-1] / measured["FANformer", "float64"][-1] for measured in by_seed)
    yield Finding(
        name=f"the FANformer's constant at {depth} layers, float32 over float64",
        ours=largest,
        unit="ratio",
        shows=None,
        sentence=f"In float32 the FANformer's constant at {depth} layers is {largest:.3g} times that of float64: the "
        f"difference of {settings.epsilon:g} is near the rounding of the numbers that carry it.",
    )
