"""Building blocks of tests that train a small model in some layout, save it and load it in another; on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.checkpoint.training_state import load_training_state, model_state, stored_state
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import DEFAULT_KERNELS, FANformerConfig, KernelsConfig
from megatron_fanformer.model.layouts import layout_fields
from megatron_fanformer.runtime.layout import DeviceKind
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid, rank_grid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything
from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
from megatron_fanformer.train.schedule import ScheduleConfig, build_scheduler
from megatron_fanformer.train.step import gathered_weights, train_step, wrap_stages
from tests.tiny import tiny_model

GLOBAL_BATCH = 4
MICRO_BATCH = 2
STEPS_BEFORE_SAVE = 2
RECIPE = OptimizerConfig(lr=1e-2)

# By name: a layout that a checkpoint is saved in and loaded in. "plain" is without the distributed optimizer.
LAYOUTS = {
    "tp1-plain": "distributed_optimizer=false",
    "tp2": "tp=2",
    "dp2-plain": "dp=2,distributed_optimizer=false",
    "pp2": "pp=2",
    "tp2-sp-plain": "tp=2,sp=true,distributed_optimizer=false",
    "dp2": "dp=2",
    "vpp2": "pp=2,vpp=2",
    "cp2": "cp=2",
    "fan-sequence-plain": "tp=2,sp=true,fan=sequence,distributed_optimizer=false",
    "dp2-overlap": "dp=2,overlap=true,ddp_bucket_size=10000",  # buckets of about a layer, whose sizes need padding
    "tp2-dp2": "tp=2,dp=2",
    "cp2-dp2-instances": "cp=2,dp=2,num_distributed_optimizer_instances=2",
}

Pieces = list[tuple[str, Any, Any, torch.Tensor]]


def small_model(**fields: Any) -> FANformerConfig:
    """A model of four layers with grouped queries, norms of heads and an odd vocabulary, with other fields."""
    sizes = {"num_layers": 4, "ffn_hidden_size": 64, "num_query_groups": 2, "seq_length": 16}
    return tiny_model(**{**sizes, "qk_layernorm": True, **fields})


def layers_for(*layouts: str) -> int:
    """As few as give each chunk of their stages one, and two at least."""
    parallel = map(parallel_config, layouts)
    return max(2, *(each.pipeline_model_parallel_size * each.virtual_stages for each in parallel))


def parallel_config(layout: str) -> ParallelConfig:
    """A layout of the table, on CPUs."""
    return ParallelConfig(**layout_fields(LAYOUTS[layout]))


def world_size(layout: str) -> int:
    """Ranks that a layout of the table takes."""
    parallel = parallel_config(layout)
    return parallel.model_parallel_size * (parallel.data_parallel_size or 1)


@dataclass
class Training:
    """A small model in training, on this rank."""

    grid: RankGrid
    model: FANformerConfig
    parallel: ParallelConfig
    stages: list[Any]
    wrapped: list[Any]
    optimizer: Any
    scheduler: Any
    optimizer_config: OptimizerConfig
    step: int = 0

    def take_steps(self, number: int) -> list[float]:
        """Train; the losses."""
        losses, micro_batches = [], GLOBAL_BATCH // (MICRO_BATCH * self.grid.data_parallel_size)
        for _ in range(number):
            self.step += 1
            self.scheduler.step(1)
            result = train_step(self.wrapped, self.optimizer, self._batches(), self.grid, micro_batches)
            losses.append(result.loss)
        return losses

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.step)
        tokens = torch.randint(self.model.vocab_size, (GLOBAL_BATCH, self.model.seq_length + 1), generator=generator)
        for samples in tokens[self.grid.data_parallel_rank :: self.grid.data_parallel_size].split(MICRO_BATCH):
            yield {
                "tokens": samples[:, :-1],
                "labels": samples[:, 1:],
                "loss_mask": torch.ones(MICRO_BATCH, self.model.seq_length),
                "position_ids": torch.arange(self.model.seq_length).expand(MICRO_BATCH, -1),
            }

    def save(self, saver: CheckpointSaver) -> Path | None:
        """Save what there is now."""
        with gathered_weights(self.wrapped):
            return saver.save(
                step=self.step,
                stages=self.stages,
                optimizer=self.optimizer,
                progress={"step": self.step, "consumed_samples": self.step * GLOBAL_BATCH},
                config=self.config(),
                attachments={},
            )

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        progress = load_training_state(
            checkpoint,
            stages=self.stages,
            optimizer=self.optimizer,
            grid=self.grid,
            resumed_entries=self.optimizer_config.rule.resumed_entries,
        )
        self.step = progress["step"]
        self.scheduler.step(self.step)

    def config(self) -> dict[str, Any]:
        """What a checkpoint's config.yaml says of the layout."""
        return {
            "parallel": {**vars(self.parallel), "data_parallel_size": self.grid.data_parallel_size},
            "runtime": {"device": "cpu"},
        }

    def pieces(self) -> Pieces:
        """This rank's pieces of the weights, Adam's moments and the main weights; each by its global name."""
        with gathered_weights(self.wrapped):
            weights = model_state(self.stages, self.grid)
            moments = stored_state(self.optimizer, weights)["optimizer_tensors"]
        return [
            (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach().float().clone())
            for state in (weights, moments)
            for shard in local_shards(state)
        ]

    def groups(self) -> list[dict[str, Any]]:
        """The groups of this rank's optimizer that have parameters, without them."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
            if group["params"]
        ]


@contextmanager
def training(
    layout: str,
    model: FANformerConfig,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    recipe: OptimizerConfig = RECIPE,
    device: DeviceKind = "cpu",
    kernels: KernelsConfig = DEFAULT_KERNELS,
) -> Iterator[Training]:
    """A model at its initial weights, in a layout of the table."""
    parallel = parallel_config(layout)
    with rank_grid(parallel, device) as grid:
        seed_everything(seed)
        stages = build_stages(model, parallel, grid, dtype=dtype, seed=seed, kernels=kernels)
        wrapped = wrap_stages(stages, parallel)
        optimizer = build_optimizer(recipe, wrapped)
        scheduler = build_scheduler(ScheduleConfig(lr_decay_style="constant"), optimizer, recipe, train_iters=10)
        yield Training(grid, model, parallel, stages, wrapped, optimizer, scheduler, recipe)


@dataclass
class Shown:
    """What one rank shows of a training at some step."""

    pieces: Pieces
    groups: list[dict[str, Any]]
    next_losses: list[float]
    """Of the two steps that follow: the first depends on the weights, the second on the optimizer's state, too."""


def show(run: Training) -> Shown:
    """The state now, and the losses of two more steps."""
    pieces, groups = run.pieces(), run.groups()
    return Shown(pieces, groups, run.take_steps(2))


def train_and_save(
    layout: str, model: FANformerConfig, dtype: torch.dtype, folder: Path, recipe: OptimizerConfig = RECIPE
) -> Shown:
    """Train some steps, save, and go on."""
    with training(layout, model, dtype=dtype, recipe=recipe) as run:
        run.take_steps(STEPS_BEFORE_SAVE)
        run.save(CheckpointSaver(folder, run.grid, keep=None))
        return show(run)


def load_and_train(
    layout: str, model: FANformerConfig, dtype: torch.dtype, checkpoint: Path, recipe: OptimizerConfig = RECIPE
) -> Shown:
    """Start from other weights, load, and go on."""
    with training(layout, model, dtype=dtype, seed=2, recipe=recipe) as run:
        run.load(checkpoint)
        return show(run)
