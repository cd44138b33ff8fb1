"""Two FAN layers in place of the MLP: trained against the plain model, and their columns in the optimizer's state."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_fanformer.checkpoint import training_state
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.model.build import initial_std
from megatron_fanformer.model.config import FANConfig, with_same_parameters
from megatron_fanformer.model.fan_functions import FANOutput, FANShard
from megatron_fanformer.runtime.parallel import ParallelConfig
from megatron_fanformer.runtime.seeding import generator_for
from tests.plain_model import from_transformers, train_plain
from tests.tiny import tiny_model
from tests.train.layouts import RECIPE, gather, train_stream
from tests.whole_models import megatron_to_hf

# Without padding, and untied, so that an export's tensors are all of the model's.
MODEL = tiny_model(
    vocab_size=128,
    seq_length=64,
    untie_embeddings_and_output_weights=True,
    fan=FANConfig(placement="ffn", activation="gelu"),
)
STEPS = 4
TP = {"tensor_model_parallel_size": 2}
LAYOUTS = [{**TP, "sequence_parallel": True}, *(pytest.param(each, marks=pytest.mark.full) for each in ({}, TP))]


def initial_weights() -> dict[str, torch.Tensor]:
    """Normal, with biases that are not zero."""
    shapes = expected_shapes(MODEL, "megatron")
    return {
        name: 0.2 * torch.randn(shape, generator=generator_for(0, name)) + (1.0 if "layernorm" in name else 0.0)
        for name, shape in shapes.items()
    }


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return from_transformers(megatron_to_hf(weights, MODEL))


@pytest.fixture(scope="module")
def stream() -> torch.Tensor:
    return torch.randint(MODEL.vocab_size, (STEPS, 4, 65), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_training_is_the_plain_models(run_on_ranks: Any, stream: torch.Tensor, degrees: dict[str, Any]) -> None:
    """Losses, gradient norms and final weights, in float32 against float64."""
    parallel = ParallelConfig(**degrees)
    weights = initial_weights()
    losses, norms, final = train_plain(
        plain(weights), stream, heads=MODEL.num_attention_heads, lr=RECIPE.lr, dtype=torch.float64, gelu=True
    )
    ranks = run_on_ranks(parallel.model_parallel_size, train_stream, MODEL, weights, stream, parallel, RECIPE.lr)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(norms, rel=1e-4)
    trained, before = plain(gather([rank.weights for rank in ranks])), plain(weights)
    assert trained.keys() == final.keys()
    for name, weight in final.items():
        moved = (weight - before[name]).norm()
        assert (trained[name] - weight).norm() < 1e-3 * moved, name


def test_each_map_is_drawn_as_the_one_that_it_replaces() -> None:
    names = [f"decoder.layers.3.mlp.linear_fc{number}.weight" for number in (1, 2)]
    assert [initial_std(MODEL, name) ** -2 for name in names] == pytest.approx([32, 2 * 48 * 4])


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_counted(bias: bool) -> None:
    model = dataclasses.replace(MODEL, fan=FANConfig(placement="ffn", p_ratio=0.3, bias=bias), ffn_hidden_size=50)
    shapes = expected_shapes(model, "megatron").values()
    assert model.num_parameters == sum(torch.Size(shape).numel() for shape in shapes)
    twin = dataclasses.replace(model, fan=FANConfig(placement="none"))
    same = with_same_parameters(model, 1)
    assert same.num_parameters == pytest.approx(twin.num_parameters, abs=3 * 32 * model.num_layers)


@pytest.mark.parametrize("cuts", [(), (1,), (17, 58), (30, 31, 32)])
def test_columns_of_a_weight_are_found_in_any_range_of_its_elements(cuts: tuple[int, ...]) -> None:
    """As the distributed optimizer shares out the elements of one rank's second map over the replicas."""
    rows, shard = 5, FANShard(2, 1, (FANOutput(3, 6),))
    width, whole = 12, 24
    weight = torch.nn.Parameter(torch.arange(100, 100 + rows * width, dtype=torch.float32).view(rows, width))
    expected, found = torch.full((rows, whole), -1.0), torch.full((rows, whole), -1.0)
    for _, start, end, canonical, _ in shard.feature_ranges():
        expected[:, canonical : canonical + end - start] = weight[:, start:end].detach()
    flat = weight.detach().flatten()
    bounds = [0, *cuts, flat.numel()]
    for first, last in itertools.pairwise(bounds):
        part = training_state._Part(weight, first, {}, True)
        for _, start, end, canonical, _ in shard.feature_ranges():
            piece = ShardedTensor(
                "weight", weight[:, start:end], torch.float32, (rows, end - start), (rows, whole), (0, canonical), None
            )
            piece.replica_id = (0, 0, 0)
            for cut in training_state._rectangles_of(piece, part, "moment", flat[first:last]):
                where = tuple(slice(o, o + s) for o, s in zip(cut.global_offset, cut.local_shape, strict=True))
                assert (found[where] == -1).all()
                found[where] = cut.data
    assert torch.equal(found, expected)
