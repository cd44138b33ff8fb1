"""Health of the FAN map's phases: their sizes, and the units whose cos and sin carry no signal, by layer.

Read by a hook on the map from the forward pass of a few training steps, of all tokens of the global batch. A unit is a
periodic row of a layer's map (of both outputs at placement `qk_and_v`), and p its phase before cos and sin.

- **Sizes**: the root mean square of p over all tokens and units, and the largest |p|.
- **Dead** is a unit whose point (cos p, sin p) stays where it is: the root mean square of its distance from its mean,
  over the tokens, is below `DEAD_SPREAD`.
- **Coarse** is a unit with a phase of `COARSE_PHASE` or more, which bf16 no longer resolves.

Every phase is seen by one rank: rows are spread over tensor parallel ranks (in the `sequence` form the sequence is),
tokens over context and data parallel ranks, layers over stages. So counts, sums and maxima are taken over all ranks,
and are those of a single one.

Shapes: n tokens of a micro batch, k the rows of one rank, of all outputs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.callbacks import Callback, is_due

DEAD_SPREAD = 2.0**-8
"""Spread of a dead unit: the distance of bf16's numbers just below 1; X_F holds little but a constant of it."""
COARSE_PHASE = 16.0
"""Smallest coarse phase: bf16's numbers are 1/8 apart from here on, and rounding moves a phase by 0.04 rad (root mean
square), the noise that FP8 adds to a phase of any size (docs/fp8-phase.md)."""


class PhaseHealth(Callback):
    """Measures the FAN map's phases on this rank; every rank has one.

    Args:
        stages: this rank's chunks of the model.
        interval: steps between measurements; None: never measure.
    """

    def __init__(self, stages: list[Any], model: FANformerConfig, grid: RankGrid, *, interval: int | None) -> None:
        self._units = model.periodic_units if model.has_fan else 0  # of attention
        self._interval = interval if self._units else None
        self._layers, self._grid = model.num_layers, grid
        kind, _ = model.placement.attention()
        modules = (module for stage in stages for module in stage.modules())
        self._attentions = [module for module in modules if self._units and isinstance(module, kind)]
        self._read: list[_LayerPhases] = []

    @contextmanager
    def around_attempt(self, step: int) -> Iterator[None]:
        """Record phases while a step is computed; costs nothing in steps that are not due."""
        if not is_due(step, self._interval):
            yield
            return
        self._read = [_LayerPhases(attention, self._units, self._grid) for attention in self._attentions]
        with ExitStack() as hooks:
            for layer in self._read:
                hooks.callback(layer.fan.linear.register_forward_hook(layer.add).remove)
            yield

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """Return one number per layer for each metric; empty, and no collective call, unless this step was measured."""
        if is_skipped or not is_due(step, self._interval):
            return {}
        sums, largest = self._over_all_ranks()
        self._read = []
        return _metrics(sums, largest)

    def _over_all_ranks(self) -> tuple[Tensor, Tensor]:
        """Return the sums and maxima of every layer, [layers, ...] each, on the CPU."""
        device = self._grid.torch_device
        sums = torch.zeros(self._layers, 2 * self._units + 4, dtype=torch.float64, device=device)
        largest = torch.zeros(self._layers, self._units, dtype=torch.float32, device=device)
        for layer in self._read:
            sums[layer.number] = torch.cat([layer.resultant.flatten(), layer.weight_squares, layer.phase_squares])
            largest[layer.number] = layer.largest
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return sums.cpu(), largest.cpu()


class _LayerPhases:
    """One layer's phases on this rank in one step."""

    def __init__(self, attention: Any, units: int, grid: RankGrid) -> None:
        self.number = attention.layer_number - 1
        """The layer's number in the whole model, from 0."""
        self.fan = attention.fan
        device = grid.torch_device
        self.resultant = torch.zeros(2, units, dtype=torch.float64, device=device)
        """Sums of cos p and of sin p by unit."""
        self.largest = torch.zeros(units, dtype=torch.float32, device=device)
        """The largest |p| of each unit."""
        self.phase_squares = torch.zeros(2, dtype=torch.float64, device=device)
        """The number of phases, and the sum of their squares."""
        self.weight_squares = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of squares of the periodic and of the linear rows; 0 where another rank counts them."""
        is_whole = self.fan.shard.ranks == 1  # the same rows on every tensor parallel rank, if there are several
        self._counts_weights = grid.groups.dp_cp.rank() == 0 and not (is_whole and grid.groups.tp.rank() > 0)

    @torch.no_grad()
    def add(self, _linear: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        """Add the map's output p | g [s, b, k] of a micro batch; a forward hook."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, for backward
        if self._counts_weights:  # not before the forward pass: the last update may be gathered in it
            self._add_weights()
            self._counts_weights = False
        pre_nk = output[0].flatten(0, 1)
        for rows, units, _ in self._outputs():
            phases = pre_nk[:, rows].float()
            self.resultant[0, units] += phases.cos().sum(0, dtype=torch.float64)
            self.resultant[1, units] += phases.sin().sum(0, dtype=torch.float64)
            self.largest[units] = torch.maximum(self.largest[units], phases.abs().amax(0))
            self.phase_squares[0] += phases.numel()
            self.phase_squares[1] += phases.square().sum(dtype=torch.float64)

    def _outputs(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield of each output this rank's periodic rows, which of the layer's units they are, and its linear rows."""
        shard = self.fan.shard
        row = unit = 0
        for periodic, linear in shard.outputs:
            first, middle, end = unit + shard.rank * periodic, row + periodic, row + periodic + linear
            yield slice(row, middle), slice(first, first + periodic), slice(middle, end)
            row = end
            unit += shard.ranks * periodic

    def _add_weights(self) -> None:
        weight: Any = self.fan.linear.weight
        rows = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float64).square_()
        for periodic, _, linear in self._outputs():
            self.weight_squares += torch.stack([rows[periodic].sum(), rows[linear].sum()])


def _metrics(sums: Tensor, largest: Tensor) -> dict[str, list[float]]:
    units = largest.shape[1]
    cos, sin, weight_squares, phase_squares = sums.split([units, units, 2, 2], dim=1)
    tokens = phase_squares[:, :1] / units
    spread = (1 - (cos / tokens).square() - (sin / tokens).square()).clamp_(min=0).sqrt_()
    metrics = {
        "health/phase_rms": (phase_squares[:, 1] / phase_squares[:, 0]).sqrt(),
        "health/phase_max": largest.amax(1),
        "health/dead_units": (spread < DEAD_SPREAD).double().mean(1),
        "health/coarse_units": (largest >= COARSE_PHASE).double().mean(1),
        "health/periodic_weight_norm": weight_squares[:, 0].sqrt(),
        "health/linear_weight_norm": weight_squares[:, 1].sqrt(),
    }
    return {name: values.tolist() for name, values in metrics.items()}
