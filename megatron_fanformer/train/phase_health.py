"""Health of the FAN map's phases, by layer: how large they are, and in which units cos and sin carry no signal.

In a few training steps, a hook on the map reads the phases of all tokens of the global batch. A unit is a periodic row
of a layer's map (in both outputs at placement `qk_and_v`), and p is its phase before cos and sin.

- **Size**: the root mean square of p over all tokens and units, and the largest |p|.
- **Dead unit**: its point (cos p, sin p) hardly moves. The root mean square distance of the point from its mean, over
  the tokens, is below `DEAD_SPREAD`.
- **Coarse unit**: it has a phase of `COARSE_PHASE` or more, which bf16 no longer resolves.

Each phase is on exactly one rank, so counts, sums and maxima over all ranks are those of a run on a single rank.

Shapes: n = s b tokens of a micro batch (s positions of b samples), k rows of the map on one rank, over all outputs.
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
"""Units with less spread are dead: bf16's numbers just below 1 are this far apart, so (cos p, sin p) hardly moves."""
COARSE_PHASE = 16.0
"""The smallest coarse phase: from here on bf16's numbers are 1/8 apart, and rounding moves a phase by 0.04 rad (root
mean square), which is the noise that FP8 adds to a phase of any size (docs/fp8-phase.md)."""


class PhaseHealth(Callback):
    """Measures the phases of the FAN maps in every `interval`-th step; None: never.

    Args:
        stages: this rank's chunks of the model.
    """

    def __init__(self, stages: list[Any], model: FANformerConfig, grid: RankGrid, *, interval: int | None) -> None:
        self._units = model.periodic_units if model.has_fan else 0  # in one attention layer
        self._interval = interval if self._units else None
        self._layers, self._grid = model.num_layers, grid
        attention_class, _ = model.placement.attention()
        modules = (module for stage in stages for module in stage.modules())
        self._attentions = [module for module in modules if self._units and isinstance(module, attention_class)]
        self._layer_phases: list[_LayerPhases] = []  # of the step that is being measured

    @contextmanager
    def around_attempt(self, step: int) -> Iterator[None]:
        """Measure phases while a step is computed, if a measurement is due."""
        if not is_due(step, self._interval):
            yield
            return
        self._layer_phases = [_LayerPhases(attention, self._units, self._grid) for attention in self._attentions]
        with ExitStack() as hooks:
            for layer in self._layer_phases:
                hooks.callback(layer.fan.linear.register_forward_hook(layer.add).remove)
            yield

    def after_step(self, step: int, *, is_skipped: bool) -> dict[str, Any]:
        """If this step was measured, return one number per layer for each metric, by a collective call."""
        if is_skipped or not is_due(step, self._interval):
            return {}
        sums, largest = self._reduce_over_ranks()
        self._layer_phases = []
        cos, sin, weight_squares, num_phases, phase_squares = sums.split([self._units, self._units, 2, 1, 1], dim=1)
        tokens = num_phases / self._units
        # Each point (cos p, sin p) has length 1, so its mean square distance from the mean is 1 - |mean|².
        spread = (1 - (cos / tokens).square() - (sin / tokens).square()).clamp_(min=0).sqrt_()
        metrics = {
            "health/phase_rms": (phase_squares / num_phases)[:, 0].sqrt(),
            "health/phase_max": largest.amax(1),
            "health/dead_units": (spread < DEAD_SPREAD).double().mean(1),
            "health/coarse_units": (largest >= COARSE_PHASE).double().mean(1),
            "health/periodic_weight_norm": weight_squares[:, 0].sqrt(),
            "health/linear_weight_norm": weight_squares[:, 1].sqrt(),
        }
        return {name: values.tolist() for name, values in metrics.items()}

    def _reduce_over_ranks(self) -> tuple[Tensor, Tensor]:
        """Return the sums [layers, 2 units + 4] and the largest |p| [layers, units] over all ranks, on the CPU.

        The sums of a layer are the fields of `_LayerPhases`: `resultant` (2 units), `weight_squares`, `phase_totals`.
        """
        device = self._grid.torch_device
        sums = torch.zeros(self._layers, 2 * self._units + 4, dtype=torch.float64, device=device)
        largest = torch.zeros(self._layers, self._units, dtype=torch.float32, device=device)
        for layer in self._layer_phases:
            sums[layer.number] = torch.cat([layer.resultant.flatten(), layer.weight_squares, layer.phase_totals])
            largest[layer.number] = layer.largest
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return sums.cpu(), largest.cpu()


class _LayerPhases:
    """Sums and maxima over the phases of one layer in one step, on this rank."""

    def __init__(self, attention: Any, units: int, grid: RankGrid) -> None:
        self.number = attention.layer_number - 1
        """The layer's number in the whole model, from 0."""
        self.fan = attention.fan
        device = grid.torch_device
        self.resultant = torch.zeros(2, units, dtype=torch.float64, device=device)
        """Sums of cos p and of sin p by unit."""
        self.largest = torch.zeros(units, dtype=torch.float32, device=device)
        """The largest |p| of each unit."""
        self.phase_totals = torch.zeros(2, dtype=torch.float64, device=device)
        """The number of phases, and the sum of their squares."""
        self.weight_squares = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of squares of the periodic and of the linear rows; 0 if another rank with the same rows counts them."""
        is_copy = self.fan.shard.ranks == 1 and grid.groups.tp.rank() > 0
        self._counts_weights = grid.groups.dp_cp.rank() == 0 and not is_copy

    @torch.no_grad()
    def add(self, _linear: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        """Add the map's output [p | g] of a micro batch, [s, b, k]; a forward hook."""
        if torch._C._current_graph_task_id() != -1:  # within backward, which recomputes the map
            return
        if self._counts_weights:  # here, because the weights are up to date once the forward pass has begun
            self._counts_weights = False
            squares = torch.linalg.vector_norm(self.fan.linear.weight, dim=1, dtype=torch.float64).square_()
            for periodic, _, linear in self._outputs():
                self.weight_squares += torch.stack([squares[periodic].sum(), squares[linear].sum()])
        output_nk = output[0].flatten(0, 1)
        for periodic, units, _ in self._outputs():
            phases = output_nk[:, periodic].float()
            self.resultant[0, units] += phases.cos().sum(0, dtype=torch.float64)
            self.resultant[1, units] += phases.sin().sum(0, dtype=torch.float64)
            self.largest[units] = torch.maximum(self.largest[units], phases.abs().amax(0))
            self.phase_totals[0] += phases.numel()
            self.phase_totals[1] += phases.square().sum(dtype=torch.float64)

    def _outputs(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield for each output of the map this rank's periodic rows, their units in the layer, and the linear rows."""
        shard = self.fan.shard
        row = unit = 0  # the output's first row on this rank, and its first unit in the layer
        for periodic, linear in shard.outputs:  # the numbers of rows on this rank
            middle, end = row + periodic, row + periodic + linear
            first_unit = unit + shard.rank * periodic  # on this rank
            yield slice(row, middle), slice(first_unit, first_unit + periodic), slice(middle, end)
            row, unit = end, unit + shard.ranks * periodic
