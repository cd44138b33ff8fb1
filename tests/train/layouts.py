"""Building blocks of tests that train reference cases in some layout, to be run on every rank."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layouts import layout_fields
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid, rank_grid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything
from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
from megatron_fanformer.train.schedule import ScheduleConfig, build_scheduler
from megatron_fanformer.train.step import gathered_weights, train_step, wrap_stages
from tests.whole_models import read_reference, reference_to_megatron

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = ("fanformer-tied", "fanformer-untied-p0125", "transformer-tied", "atl")
RECIPE = OptimizerConfig(lr=5e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, clip_grad=1.0)
CONSTANT = ScheduleConfig(lr_decay_style="constant")


def layout(text: str = "", **degrees: Any) -> ParallelConfig:
    """The parallel configuration that a text such as `tp=2,sp=true` says, and other fields."""
    return ParallelConfig(**layout_fields(text), **degrees)


def ranks_of(parallel: ParallelConfig) -> int:
    """How many ranks a test has for it: as many replicas as it names, else one."""
    return parallel.model_parallel_size * parallel.resolve_data_parallel_size(None)


def reference_tensors(case: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A reference case's configuration, and its weights under our global names."""
    config, tensors = read_reference(REFERENCE / case)
    return config, reference_to_megatron(tensors, config)


@torch.no_grad()
def set_weights(chunks: list[Any], grid: RankGrid, tensors: dict[str, torch.Tensor]) -> None:
    """Give the chunks of a stage their shards of whole tensors."""
    for chunk in chunks:
        for shard in local_shards(sharded_state(chunk, grid)):
            shard.data.copy_(tensors[shard.key][shard.global_slice()])


def shards_of(chunks: list[Any], grid: RankGrid, *, gradients: bool = False) -> list[tuple[str, Any, Any, Any]]:
    """(global name, global shape, global slice, values) of each piece of this rank's weights, or their gradients."""
    states = [sharded_state(chunk, grid) for chunk in chunks]
    if gradients:
        states = [
            {name: _gradient_of(value) for name, value in state.items() if isinstance(value.data, torch.Tensor)}
            for state in states
        ]
    return [
        (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach().float().clone())
        for state in states
        for shard in local_shards(state)
    ]


def _gradient_of(value: Any) -> Any:
    gradient = getattr(value.data, "main_grad", None)
    gradient = value.data.grad if gradient is None else gradient
    kind = {} if not hasattr(value, "dtype") else {"dtype": gradient.dtype}
    return dataclasses.replace(value, data=gradient, **kind)


def gather(pieces_of_ranks: list[list[tuple[str, Any, Any, Any]]]) -> dict[str, torch.Tensor]:
    """Whole tensors by global name, out of the pieces of all ranks; replicated pieces must be equal."""
    whole: dict[str, torch.Tensor] = {}
    for name, shape, where, values in (piece for pieces in pieces_of_ranks for piece in pieces):
        tensor = whole.setdefault(name, torch.full(shape, float("nan")))
        before = tensor[where]
        assert before.isnan().all() or torch.equal(before, values), f"{name} differs between replicas"
        tensor[where] = values
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


@dataclass
class TrainedCase:
    """What one rank saw of a training run on a reference case's stream."""

    losses: list[float]
    grad_norms: list[float]
    weights: list[tuple[str, Any, Any, Any]]


def train_reference(
    case: str, parallel: ParallelConfig, lr: float = RECIPE.lr, steps: int | None = None
) -> TrainedCase:
    """Train a reference case by its recipe on its stream of batches, or so many of them, in a layout, on this rank."""
    config, tensors = reference_tensors(case)
    stream = load_file(REFERENCE / case / "stream.safetensors")["stream"][:steps]
    return train_stream(config, tensors, stream, parallel, lr)


def train_stream(
    config: FANformerConfig, tensors: dict[str, torch.Tensor], stream: torch.Tensor, parallel: ParallelConfig, lr: float
) -> TrainedCase:
    """Train whole tensors by the reference's recipe on batches [steps, 4, 65] in a layout, on this rank."""
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        stages = build_stages(config, parallel, grid, dtype=torch.float32, seed=None)
        set_weights(stages, grid, tensors)
        wrapped = wrap_stages(stages, parallel)
        recipe = dataclasses.replace(RECIPE, lr=lr)
        optimizer = build_optimizer(recipe, wrapped)
        scheduler = build_scheduler(CONSTANT, optimizer, recipe, train_iters=len(stream))
        scheduler.step(1)  # megatron-core sets each group's decay there
        results = [train_step(wrapped, optimizer, stream_batches(batch, grid), grid, 2) for batch in stream]
        with gathered_weights(wrapped):
            weights = shards_of(stages, grid)
        return TrainedCase([r.loss for r in results], [r.grad_norm for r in results], weights)


def stream_batches(batch: torch.Tensor, grid: RankGrid) -> Any:
    """One step's [4, 65] tokens as this replica's two micro batches."""
    for samples in batch[grid.data_parallel_rank :: grid.data_parallel_size].chunk(2):
        yield {
            "tokens": samples[:, :-1],
            "labels": samples[:, 1:],
            "loss_mask": torch.ones(len(samples), 64),
            "position_ids": torch.arange(64).expand(len(samples), 64),
        }
