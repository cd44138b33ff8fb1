"""The backward pass of FAN and of the layer that reads X_F: in which order things happen, and where gradients go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.fan_functions import Activation, Exchanged, FANActivationAndProduct, FANOutput, FANShard
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.tiny import tiny_model

MODEL = tiny_model(hidden_size=64, seq_length=6)
TOKENS, ROWS = 6, 3 * 64 // 2  # of a sample, and of QKV on one of two ranks


class Recorded(TorchDispatchMode):
    """Matrix products by the shape of what they make, and collectives when they start, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.events.append("reduce-scatter" if "reduce_scatter" in name else "all-gather")
        elif name == "mm":
            self.events.append(f"product {list(made.shape)}")
        return made


@contextmanager
def recorded() -> Iterator[list[str]]:
    wait = Exchanged.wait
    with Recorded() as mode:

        def recorded_wait(exchanged: Exchanged) -> torch.Tensor:
            mode.events.append("wait")
            return wait(exchanged)

        with mock.patch.object(Exchanged, "wait", recorded_wait):
            yield mode.events


def backward_events(parallel: ParallelConfig, fan: FANConfig) -> list[str]:
    """What a layer does from the gradients of queries, keys and values to that of its input."""
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        model = tiny_model(**{**MODEL.__dict__, "fan": fan})
        (stage,) = build_stages(model, parallel, grid, dtype=torch.float32, seed=1)
        attention = stage.decoder.layers[0].self_attention
        tensors = attention.get_query_key_value_tensors(torch.randn(TOKENS // grid.groups.tp.size(), 1, 64))
        weight = (attention.linear_qkv if fan.placement == "qkv" else attention.linear_qk).weight
        with recorded() as events:
            weight.register_post_accumulate_grad_hook(lambda _: events.append("weight's gradient is there"))
            torch.stack(list(tensors)).prod(0).sum().backward()
        return events


@pytest.mark.parametrize("placement", ["qkv", "qk_and_v"])
def test_the_sum_over_ranks_runs_during_the_weight_gradient(run_on_ranks: Any, placement: Any) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    fan = FANConfig(placement=placement)
    rows = ROWS if placement == "qkv" else ROWS * 2 // 3
    for events in run_on_ranks(2, backward_events, parallel, fan):
        assert events[:5] == [
            f"product [{TOKENS}, 64]",
            "reduce-scatter",
            f"product [{rows}, 64]",
            "wait",
            "weight's gradient is there",
        ]


def test_p_and_g_are_gathered_again_during_the_input_gradient(run_on_ranks: Any) -> None:
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["fan"]}
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, **recomputed)
    for events in run_on_ranks(2, backward_events, parallel, FANConfig()):
        assert events[:6] == [
            "all-gather",
            f"product [{TOKENS}, 64]",
            "wait",
            "reduce-scatter",
            f"product [{ROWS}, 64]",
            "wait",
        ]


def test_the_weight_gradient_may_be_added_to_the_main_gradient() -> None:
    """By Megatron's protocol: what autograd gets is a stand-in, which a flag marks as not to be read."""
    activation = Activation(FANShard(1, 0, (FANOutput(2, 4),)), None, gelu=False)
    pre_sbk = torch.randn(5, 2, 6, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(3, 8))
    product, _ = FANActivationAndProduct.apply(pre_sbk, weight, activation, True)
    product.square().sum().backward()
    expected, expected_pre = weight.grad.clone(), pre_sbk.grad.clone()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    pre_sbk.grad = None
    product, _ = FANActivationAndProduct.apply(pre_sbk, weight, activation, True)
    product.square().sum().backward()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, 1 + expected)
    assert torch.equal(pre_sbk.grad, expected_pre)
