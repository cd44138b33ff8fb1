"""A placement of one file trains, is exported and read back."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.runtime.parallel import ParallelConfig
from megatron_fanformer.runtime.seeding import generator_for
from tests.model.toy_placement import NAME, registered, train
from tests.tiny import tiny_model
from tests.train.layouts import gather
from tests.whole_models import export_huggingface, hf_to_megatron, read_huggingface

STEPS = 2
# Without padding, and untied, so that an export's tensors are all of the model's.
MODEL = tiny_model(
    vocab_size=128, seq_length=64, untie_embeddings_and_output_weights=True, fan=FANConfig(placement=NAME)
)


@pytest.fixture(autouse=True)
def placement() -> Iterator[None]:
    with registered():
        yield


def weights() -> dict[str, torch.Tensor]:
    return {
        name: 0.2 * torch.randn(shape, generator=generator_for(0, name)) + (1.0 if "layernorm" in name else 0.0)
        for name, shape in expected_shapes(MODEL, "megatron").items()
    }


def test_it_trains_alike_on_one_rank_and_on_two(run_on_ranks: Any) -> None:
    stream = torch.randint(MODEL.vocab_size, (STEPS, 4, 65), generator=torch.Generator().manual_seed(1))
    (one,) = run_on_ranks(1, train, MODEL, weights(), stream, ParallelConfig(), 5e-3)
    two = ParallelConfig(tensor_model_parallel_size=2)
    ranks = run_on_ranks(2, train, MODEL, weights(), stream, two, 5e-3)
    assert one.losses[0] != one.losses[1]
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=1e-6)
        assert rank.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
    trained, whole = gather([rank.weights for rank in ranks]), gather([one.weights])
    assert trained.keys() == whole.keys() == weights().keys()
    assert sum(weight.numel() for weight in whole.values()) == MODEL.num_parameters
    for name, weight in whole.items():
        assert torch.allclose(trained[name], weight, atol=1e-4), name


def test_an_export_comes_back_equal_to_the_bit_and_computes_what_is_trained(run_on_ranks: Any, tmp_path: Path) -> None:
    export_huggingface(MODEL, weights(), tmp_path / "export", dtype=torch.float32)
    config, tensors = read_huggingface(tmp_path / "export")
    assert (config.fan, config.num_parameters) == (MODEL.fan, MODEL.num_parameters)
    back = hf_to_megatron(tensors, config)
    assert back.keys() == weights().keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights().items())
    stream = torch.randint(MODEL.vocab_size, (1, 4, 65), generator=torch.Generator().manual_seed(2))
    (trained,) = run_on_ranks(1, train, MODEL, weights(), stream, ParallelConfig(), 5e-3)
    model = FANformerForCausalLM.from_pretrained(tmp_path / "export")
    assert model.config.to_dict()["fan_placement"] == to_huggingface_config(MODEL).fan_placement == NAME
    assert model(stream[0], labels=stream[0]).loss.item() == pytest.approx(trained.losses[0], rel=1e-6)


def test_configurations_and_layouts_are_checked() -> None:
    assert FANformerConfig.from_dict(dataclasses.asdict(MODEL)).fan == MODEL.fan
    (message,) = layout_problems(MODEL, ParallelConfig(fan_form="sequence"))
    assert message.startswith(f"parallel.fan_form is sequence at model.fan.placement {NAME}")
