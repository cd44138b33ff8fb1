"""Measures how well models fit t mod 5 inside and outside the range of their samples (fig. 1a of the paper).

Two controls read the number t itself: an original FAN network (Dong et al., 2024) and an MLP of as many parameters. A
Transformer and a FANformer of as many parameters read t as a sequence of one token. Their norms divide by |t|, which
leaves little more than the sign of t: so a FANformer without the attention's norm is measured, too. Errors are mean
squares over an even grid; a model that always answers the mean has 25/12.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fanformer.experiments.intervals import ratio_mean
from megatron_fanformer.experiments.probe import ModSettings
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.experiments.twins import (
    SAME_PARAMETERS,
    TRANSFORMER,
    FANLayer,
    fresh_model,
    seeded,
    small_fanformer,
    twins,
)
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.pictures import render_png

PERIOD = 5.0
NUM_HEADS = 4
GRID = 4000  # points at which an error is measured
FAN, MLP = "FAN network", "MLP"
WITHOUT_NORM = "FANformer without the attention's norm"
PAIRS = ((FAN, MLP), (SAME_PARAMETERS, TRANSFORMER), (WITHOUT_NORM, SAME_PARAMETERS))
"""Pairs of models to compare: the first model's error is divided by the second's."""
PAPER = "FANformer fits t mod 5 outside its range, a Transformer does not (curves alone)"

Errors = dict[str, dict[str, list[float]]]  # by model, then by "inside" or "outside" the range: an error for each seed


def measure(settings: ModSettings, _folder: Path, log: Log) -> Measured:
    """Train every model with every seed, and measure its error inside and outside the range of its training."""
    errors: Errors = {}
    fits: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {}
    for seed in range(settings.seeds):
        for name, model, training in _models(settings, seed):
            train(model, training, seed)
            inside = error(model, 0.0, training.half_range)
            outside = error(model, training.half_range, 2 * training.half_range)
            errors_of_model = errors.setdefault(name, {"inside": [], "outside": []})
            errors_of_model["inside"].append(inside)
            errors_of_model["outside"].append(outside)
            if seed == 0:  # the picture shows one fit of each model
                fits[name] = training.half_range, model
            log(f"seed {seed}: {name}: {inside:.3f} inside, {outside:.3f} outside")
    picture = render_png(lambda panels: _draw(panels[:, 0], fits), rows=len(fits), size=(8, 1.7))
    rows: list[list[Cell]] = [
        [name, seed, inside, outside]
        for name, by_place in errors.items()
        for seed, (inside, outside) in enumerate(zip(by_place["inside"], by_place["outside"], strict=True))
    ]
    table = Table(title="Mean square errors", columns=["model", "seed", "inside", "outside"], rows=rows)
    return Measured(findings=list(_findings(errors)), tables=[table], pictures={"fit.png": picture})


class Training(NamedTuple):
    """The training of one model."""

    half_range: float  # samples lie within ± this
    steps: int
    rate: float  # the learning rate at the start
    batch_size: int


class OneToken(nn.Module):
    """Applies a language model's layers to b numbers, each a sequence of one token: [b, 1] -> [b, 1]."""

    def __init__(self, config: FANformerConfig, scale: float, seed: int, *, has_norm: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.layers = fresh_model(config, seed).model
        if not has_norm:
            for layer in self.layers.layers:
                layer.input_layernorm = nn.Identity()  # the attention's norm
        self.embed, self.read_out = nn.Linear(1, config.hidden_size), nn.Linear(config.hidden_size, 1)

    def forward(self, t: Tensor) -> Tensor:
        """[b, 1] -> [b, 1]."""
        embedded = self.embed(self.scale * t)[:, None]
        return self.read_out(self.layers(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, 0])


def _mlp(parameters: int) -> nn.Module:
    """Return an MLP with about `parameters` parameters; an MLP of width w has 2 w² + 5 w + 1."""
    width = round((math.sqrt(25 + 8 * (parameters - 1)) - 5) / 4)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(1, width), *hidden, nn.Linear(width, 1))


def _models(settings: ModSettings, seed: int) -> Iterator[tuple[str, nn.Module, Training]]:
    """Yield every model, with random weights of a seed, after its name and before its training."""
    size = settings.control_size
    control = Training(settings.half_range, settings.control_steps, settings.control_rate, settings.batch_size)
    fan = seeded(
        seed,
        lambda: nn.Sequential(nn.Linear(1, size), FANLayer(size, F.gelu), FANLayer(size, F.gelu), nn.Linear(size, 1)),
    )
    yield FAN, fan, control
    yield MLP, seeded(seed, lambda: _mlp(sum(weight.numel() for weight in fan.parameters()))), control
    training = Training(settings.model_half_range, settings.model_steps, settings.model_rate, settings.batch_size)
    kinds = twins(small_fanformer(settings.model_layers, settings.model_size, NUM_HEADS, vocab_size=1))
    for name, twin in ((TRANSFORMER, TRANSFORMER), (SAME_PARAMETERS, SAME_PARAMETERS), (WITHOUT_NORM, SAME_PARAMETERS)):
        model = partial(OneToken, kinds[twin], settings.model_scale, seed, has_norm=name != WITHOUT_NORM)
        yield name, seeded(seed, model), training


def target(t: Tensor) -> Tensor:
    """Return t mod 5, the function to fit."""
    return t.remainder(PERIOD)


def train(model: nn.Module, training: Training, seed: int) -> None:
    """Minimize the mean square error by AdamW, over samples that depend on the seed alone."""
    samples = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / training.steps))
    )
    for _ in range(training.steps):
        t = training.half_range * (2 * torch.rand(training.batch_size, 1, generator=samples) - 1)
        loss = F.mse_loss(model(t), target(t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def error(model: Callable[[Tensor], Tensor], low: float, high: float) -> float:
    """Return the mean square error over low < |t| ≤ high."""
    positive = low + (high - low) * (torch.arange(GRID // 2) + 0.5) / (GRID // 2)
    t = torch.cat([-positive.flip(0), positive])[:, None]
    return F.mse_loss(model(t), target(t)).item()


def _findings(errors: Errors) -> Iterator[Finding]:  # a ratio of errors for each of PAIRS, outside and inside
    for first, second in PAIRS:
        for place in ("outside", "inside"):
            ratios = [a / b for a, b in zip(errors[first][place], errors[second][place], strict=True)]
            ours, interval = ratio_mean(ratios)
            means = [statistics.fmean(errors[model][place]) for model in (first, second)]
            yield Finding(
                name=f"error {place} the range, {first} over {second}",
                paper=PAPER if place == "outside" and second == TRANSFORMER else None,
                ours=ours,
                interval=interval,
                unit="ratio",
                shows=None if interval is None else interval[1] < 1,
                sentence=f"{place.capitalize()} the range the error of the {first} is {ours:.3g} times that of the "
                f"{second} ({means[0]:.3g} and {means[1]:.3g} in the mean of {len(ratios)} seeds).",
            )


@torch.no_grad()
def _draw(panels: Any, fits: Mapping[str, tuple[float, Callable[[Tensor], Tensor]]]) -> None:
    """Draw seed 0's fits around the upper end of the range."""
    for (name, (half_range, model)), axes in zip(fits.items(), panels, strict=True):
        low, high = half_range - 4 * PERIOD, half_range + 4 * PERIOD
        t = torch.linspace(max(low, -half_range), high, 800)[:, None]
        axes.plot(t[:, 0], target(t)[:, 0], linewidth=0.8, color="gray", label="t mod 5")
        axes.plot(t[:, 0], model(t)[:, 0], linewidth=1.2, label=name)
        axes.axvspan(half_range, high, alpha=0.12)
        axes.set(ylim=(-1.5, 6.5), title=f"{name}: trained up to {half_range:g}, outside shaded")
