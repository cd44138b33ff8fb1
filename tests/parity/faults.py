"""Faults as trainers have had them, each planted in every rank of a layout (never in one process)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads, param_and_grad_buffer
from megatron.core.optimizer import optimizer

from megatron_fanformer.model import fan_functions, fan_layer, local_layers
from megatron_fanformer.parity import trial as trials
from megatron_fanformer.runtime import pipeline
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train import step

Planting = Callable[[], AbstractContextManager[Any]]


def without_sequence_parallel_mark(layer_class: Callable[[], type[torch.nn.Module]]) -> Planting:
    """Gradients of a replicated weight are of a part of the sequence, and nobody sums them."""

    @contextmanager
    def plant() -> Iterator[None]:
        layer = layer_class()
        build = layer.__init__

        def build_unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            for parameter in self.parameters():
                parameter.sequence_parallel = False

        with mock.patch.object(layer, "__init__", build_unmarked):
            yield

    return plant


def sum_input_gradient_too(self: Any, pre_sbk: torch.Tensor) -> Any:
    made = fan_functions.FANActivation.apply(pre_sbk, self.activation)
    self.allreduce_dgrad = True
    return fan_layer.ColumnParallelLinear.forward(self, made[0])[0], made


def linear_rows_first_on_rank_1(
    self: fan_functions.FANShard, right: Any = fan_functions.FANShard.row_ranges
) -> list[fan_functions.RowRange]:
    parts = right(self)
    if self.rank != 1:
        return parts
    periodic, linear = parts
    rows = linear.end - linear.start
    return [linear._replace(start=0, end=rows), periodic._replace(start=rows, end=linear.end)]


def bias_on_every_rank(
    self: Any, x_sbh: torch.Tensor, right: Any = fan_layer.FANProjection.pre_activation
) -> torch.Tensor:
    return right(self, x_sbh) + (self.shard.ranks - 1) * self.linear.bias


@contextmanager
def tied_embedding_not_reduced() -> Iterator[None]:
    module = sys.modules[finalize_model_grads.__module__]
    names = [
        name for name in ("_allreduce_word_embedding_grads", "_allreduce_embedding_grads") if hasattr(module, name)
    ]
    with mock.patch.multiple(module, **{name: lambda *_args, **_kwargs: None for name in names}):
        yield


def first_replicas_samples(*args: Any, right: Any = trials.micro_batches, **kwargs: Any) -> Any:
    return right(*args, **{**kwargs, "data_parallel_rank": 0})


def mean_of_micro_batch_means(losses_bs: torch.Tensor, loss_mask_bs: torch.Tensor) -> Any:
    loss = (losses_bs * loss_mask_bs).sum() / loss_mask_bs.sum()
    report = torch.stack([loss.detach().double(), torch.ones((), dtype=torch.float64)])
    return loss, torch.ones((), dtype=torch.int), {"loss_and_tokens": report}


def own_part(self: fan_functions.Activation, grad_tsbk: torch.Tensor) -> fan_functions.Exchanged:
    return fan_functions.Exchanged(grad_tsbk[self.shard.rank].contiguous())


def contiguous_chunks(tensor_bs: torch.Tensor, grid: Any) -> torch.Tensor:
    """The batch is cut in halves; attention and positions think it dealt out from both ends."""
    return tensor_bs.chunk(grid.context_parallel_size, dim=1)[grid.groups.cp.rank()]


def local_norm(gradients: Any, *_args: Any, **_kwargs: Any) -> float:
    parts = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    return float(sum((part.float() ** 2).sum() for part in parts) ** 0.5)


class Fault(NamedTuple):
    """A fault, the layout that it is planted in, and what a comparison must find first."""

    plant: Planting
    layout: str
    first: str


def replaced(owner: Any, name: str, function: Any, layout: str, first: str) -> Fault:
    return Fault(partial(mock.patch.object, owner, name, function), layout, first)


TP, SEQUENCE = "tp=2", "tp=2,sp=true,fan=sequence"
EMBEDDING = "gradient of embedding.word_embeddings.weight"
FAULTS = {
    "FAN weight gradient not summed (sequence)": Fault(
        without_sequence_parallel_mark(lambda: local_layers.ReplicatedLinear),
        SEQUENCE,
        "gradient of decoder.layers.0.self_attention.fan.linear.weight",
    ),
    "QKV input gradient summed twice (column)": replaced(
        fan_layer.ActivatedColumnParallelLinear, "forward", sum_input_gradient_too, TP, EMBEDDING
    ),
    "p and g shards swapped on one rank": replaced(
        fan_functions.FANShard, "row_ranges", linear_rows_first_on_rank_1, TP, "output of layers.0.fan"
    ),
    "norm gradient not summed under sequence parallelism": Fault(
        without_sequence_parallel_mark(lambda: local_layers.RMSNorm),
        "tp=2,sp=true",
        "gradient of decoder.layers.0.input_layernorm.weight",
    ),
    "tied embedding not reduced across stages": Fault(tied_embedding_not_reduced, "pp=2", EMBEDDING),
    "a replica fed another's samples": replaced(
        trials, "micro_batches", first_replicas_samples, "dp=2", "output of embedding"
    ),
    # (The fused loss head refuses it outright.)
    "mean of micro batch means": replaced(
        step, "_sum_loss", mean_of_micro_batch_means, "dp=2,chunked_loss_head=false", "loss of step 1"
    ),
    "bias added on every rank": replaced(
        fan_layer.FANProjection, "pre_activation", bias_on_every_rank, TP, "output of layers.0.fan"
    ),
    "FAN gradient not reduced": replaced(fan_functions.Activation, "reduce_scatter", own_part, TP, EMBEDDING),
    "context chunks contiguous": replaced(
        pipeline, "local_positions", contiguous_chunks, "cp=2", "output of embedding"
    ),
    "gradient norm of one rank's shards": replaced(optimizer, "get_grad_norm_fp32", local_norm, TP, "loss of step 2"),
    "updated weights not gathered": replaced(
        param_and_grad_buffer._ParamAndGradBucketGroup,
        "start_param_sync",
        lambda *_args, **_kwargs: None,
        "dp=2,distributed_optimizer=true",
        "loss of step 2",
    ),
}


def faulty_trial(name: str, *arguments: Any) -> Any:
    """`run_trial` with a fault of the table in it."""
    return trial_with(FAULTS[name], *arguments)


def trial_with(fault: Fault, trial: Any, layout: ParallelConfig, number: int = 0) -> Any:
    """`run_trial` with a fault in it wherever there are several ranks."""
    if dist.get_world_size() == 1:
        return trials.run_trial(trial, layout, number)
    with fault.plant():
        return trials.run_trial(trial, layout, number)
