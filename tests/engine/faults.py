"""The faults of tests/parity in Transformer Engine's layers: the same kinds of mistake, made with the Engine's classes.

Every layout is one of the Engine's layers, held against one process with the local ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.parity.faults import FAULTS, Fault, trial_with, without_sequence_parallel_mark

ENGINE = "transformer_impl=transformer_engine"


def _replicated() -> type[torch.nn.Module]:
    from megatron_fanformer.model import te_layers

    return te_layers.BF16ReplicatedTELinear


@contextmanager
def qkv_sums_its_input_gradient_too() -> Iterator[None]:
    """The Engine's own column parallel layer behind FAN, whose input is whole."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    from megatron_fanformer.model import te_layers
    from megatron_fanformer.model.fan_layer import without_sequence_parallel

    class SummingLinear(TEColumnParallelLinear):
        def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(*args, config=without_sequence_parallel(config), **kwargs)

    with mock.patch.object(te_layers, "WholeInputTEColumnParallelLinear", SummingLinear):
        yield


@contextmanager
def norm_gradient_not_summed() -> Iterator[None]:
    """Norms inside the Engine's layers lose the mark by which megatron-core sums their gradients."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    build = TELayerNormColumnParallelLinear.__init__

    def build_unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.layer_norm_weight.sequence_parallel = False

    with mock.patch.object(TELayerNormColumnParallelLinear, "__init__", build_unmarked):
        yield


@contextmanager
def norm_dropped() -> Iterator[None]:
    """The input norm that is fused into the FAN map is not there: the known trap of FANformer in Megatron."""
    from megatron_fanformer.model import te_layers

    class WithoutNorm(te_layers.BF16FANTELayerNormColumnParallelLinear):
        def forward(self, x_sbh: torch.Tensor) -> Any:
            with mock.patch(
                "transformer_engine.pytorch.module.layernorm_linear.apply_normalization",
                lambda x, *_args, **_kwargs: (x.clone(), None, torch.ones(x.shape[0])),
            ):
                return super().forward(x_sbh)

    with mock.patch.object(te_layers, "BF16FANTELayerNormColumnParallelLinear", WithoutNorm):
        yield


@contextmanager
def replicated_weight_counted_on_every_rank() -> Iterator[None]:
    """The gradient norm takes the FAN map of the `sequence` form, which every rank holds whole, for a shard."""
    from megatron_fanformer.model import te_layers

    build = te_layers.ReplicatedTELinear.__init__

    def build_marked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.weight.tensor_model_parallel = True

    with mock.patch.object(te_layers.ReplicatedTELinear, "__init__", build_marked):
        yield


TP, SEQUENCE = "tp=2", "tp=2,sp=true,fan=sequence"
_OWN = {
    "FAN weight gradient not summed (sequence)": Fault(
        without_sequence_parallel_mark(_replicated),
        SEQUENCE,
        "gradient of decoder.layers.0.self_attention.fan.linear.weight",
    ),
    "QKV input gradient summed twice (column)": Fault(
        qkv_sums_its_input_gradient_too, TP, "gradient of embedding.word_embeddings.weight"
    ),
    "norm gradient not summed under sequence parallelism": Fault(
        norm_gradient_not_summed, "tp=2,sp=true", "gradient of decoder.layers.0.input_layernorm.weight"
    ),
    "replicated weight counted on every rank": Fault(
        replicated_weight_counted_on_every_rank, SEQUENCE, "loss of step 2"
    ),
    "input norm dropped": Fault(norm_dropped, TP, "output of layers.0.fan"),
}
# Context parallelism by the Engine is of 16 bits alone: this one is compared in bf16.
CONTEXT = "context chunks contiguous"
FAULTS_IN_BF16 = {CONTEXT: FAULTS[CONTEXT]._replace(layout=f"cp=2,{ENGINE}")}
ENGINE_FAULTS = {
    name: fault._replace(layout=f"{fault.layout},{ENGINE}")
    for name, fault in {**FAULTS, **_OWN}.items()
    if name != CONTEXT
}
OUTSIDE_LAYERS = {
    "tied embedding not reduced across stages",
    "a replica fed another's samples",
    "mean of micro batch means",
    "gradient norm of one rank's shards",
    "updated weights not gathered",
}
"""Mistakes in what is the same with any layers: tests/parity has them caught over local ones in each run."""


def faulty_trial(name: str, *arguments: Any) -> Any:
    """`run_trial` with a fault of these tables in it; for the ranks of the Engine."""
    return trial_with({**ENGINE_FAULTS, **FAULTS_IN_BF16}[name], *arguments)
