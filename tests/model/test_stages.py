"""Stages made of megatron-core's two model classes: to the bit the same, under the same names.

Both are there from megatron-core 0.19 on.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fanformer.model import build, stages
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import generator_for, seed_everything
from tests.tiny import tiny_model
from tests.train.layouts import TrainedCase, gather, layout, ranks_of, shards_of, train_stream

pytestmark = pytest.mark.skipif(not stages.HAS_HYBRID_MODEL, reason="HybridModel comes with megatron-core 0.19")

STREAM = torch.randint(128, (2, 4, 65), generator=torch.Generator().manual_seed(1))


def model_of(**fields: Any) -> FANformerConfig:
    return tiny_model(**{"vocab_size": 128, "seq_length": 64, **fields})


CASES: dict[str, tuple[FANformerConfig, ParallelConfig]] = {
    "one rank, recomputed": (
        model_of(num_layers=3),
        layout(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    ),
    "sp, selective": (
        model_of(untie_embeddings_and_output_weights=True),
        layout("tp=2,sp=true", recompute_granularity="selective", recompute_modules=["core_attn", "fan", "mlp"]),
    ),
    "pp, uneven, tied": (model_of(num_layers=3), layout("pp=2", num_layers_in_first_pipeline_stage=1)),
    "vpp, own values": (
        model_of(num_layers=4, fan=FANConfig(placement="qk_and_v")),
        layout("pp=2,vpp=2", recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    ),
    "cp, FAN layers for the MLP": (model_of(fan=FANConfig(placement="ffn")), layout("cp=2")),
}


def made_of(name: str) -> Any:
    """Within it stages are made of that model class."""
    from megatron_fanformer.model.hybrid_spec import HybridStage
    from megatron_fanformer.model.stages import GPTStage

    classes = {"gpt": GPTStage, "hybrid": HybridStage}
    return mock.patch.object(build, "stage_class", lambda: classes[name])


def trained(name: str, model: FANformerConfig, weights: dict[str, torch.Tensor], parallel: ParallelConfig) -> Any:
    with made_of(name):
        return train_stream(model, weights, STREAM, parallel, 5e-3)


def drawn(name: str, model: FANformerConfig) -> dict[str, torch.Tensor]:
    """All weights of a new model on one rank, by their global names."""
    with made_of(name), rank_grid(ParallelConfig(), "cpu") as grid:
        seed_everything(0)
        stages = build.build_stages(model, ParallelConfig(), grid, dtype=torch.float32, seed=3)
        return gather([shards_of(stages, grid)])


@pytest.mark.parametrize("case", CASES)
def test_both_train_alike_to_the_bit(case: str, run_on_ranks: Any) -> None:
    model, parallel = CASES[case]
    (new,) = run_on_ranks(1, drawn, "hybrid", model)
    weights = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator_for(0, name)) for name, weight in new.items()
    }
    ours: list[TrainedCase]
    ours, others = (
        run_on_ranks(ranks_of(parallel), trained, kind, model, weights, parallel) for kind in ("hybrid", "gpt")
    )
    assert ours[-1].losses[0] != ours[-1].losses[1]
    for own, other in zip(ours, others, strict=True):
        assert (own.losses, own.grad_norms) == (other.losses, other.grad_norms)
        for (name, *place, values), (other_name, *other_place, expected) in zip(
            own.weights, other.weights, strict=True
        ):
            assert (name, place) == (other_name, other_place)
            assert torch.equal(values, expected), name


def test_both_draw_the_same_weights(run_on_ranks: Any) -> None:
    model = model_of()
    ((ours,), (others,)) = (run_on_ranks(1, drawn, kind, model) for kind in ("hybrid", "gpt"))
    assert list(ours) == list(others)
    assert all(torch.equal(weight, others[name]) for name, weight in ours.items())
