"""Stock Megatron-LM's models, built from our specs as `--spec` makes its training scripts build them, against ours.

Both have the same weights, and must compute the same numbers: losses, logits and gradients, up to float32's last
places. What differs is SwiGLU, the final norm and the loss head, whose gradients our own model writes out itself.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import transformer_block

from megatron_fanformer.checkpoint import megatron_versions
from megatron_fanformer.checkpoint.stored_files import read_table
from megatron_fanformer.model.build import build_stages, transformer_config
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.local_layers import RMSNorm
from megatron_fanformer.model.stages import GPTStage
from megatron_fanformer.runtime.layout import DeviceKind
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.stock_megatron import (
    ARCHITECTURE,
    HAS_TRAINING,
    SPEC,
    STACK_SPEC,
    WITHOUT_APEX,
    WITHOUT_ENGINE,
    command_line,
    configuration_by_hand,
    own_name,
    parsed_arguments,
    stock_model,
)
from tests.tiny import tiny_model
from tests.train.layouts import layout
from tests.whole_models import save_state

MODEL = tiny_model(hidden_size=64, ffn_hidden_size=128, vocab_size=256, seq_length=32)
MY_SPEC = ["tests.model.my_fanformer", "my_layer_spec"]
MY_MODEL = dataclasses.replace(MODEL, fan=FANConfig(p_ratio=0.125), qk_layernorm=True)
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "parallelism.md"
SECTION = "## From stock Megatron-LM"
SAME = 2e-6  # of the greatest element: sums of some hundred float32 products


NEEDS_TRAINING = pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training comes with megatron-core 0.19")


def batch() -> dict[str, torch.Tensor]:
    """What pretrain_gpt.py hands to the model: one sample, and the causal mask that its data loader makes."""
    stream = torch.randint(MODEL.vocab_size, (1, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": stream[:, :-1],
        "position_ids": torch.arange(MODEL.seq_length).unsqueeze(0),
        "attention_mask": torch.ones(1, 1, MODEL.seq_length, MODEL.seq_length).triu(1).bool(),
        "labels": stream[:, 1:],
    }


def numbers_of(model: Any) -> dict[str, torch.Tensor]:
    """This rank's losses, part of the logits, and gradients by name."""
    inputs = batch()
    losses = model(**inputs, loss_mask=torch.ones_like(inputs["labels"], dtype=torch.float32))
    losses.mean().backward()
    gradients = {f"gradient of {name}": weight.grad.clone() for name, weight in model.named_parameters()}
    del inputs["labels"]
    with torch.no_grad():
        return {"losses": losses.detach(), "logits": model(**inputs), **gradients}


def stock_and_ours(
    model: FANformerConfig,
    parallel: ParallelConfig,
    spec: list[str],
    norm: type | None = None,
    device: DeviceKind = "cpu",
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """The numbers of stock Megatron's model and of ours with the same weights, and both final norms' epsilon.

    Args:
        norm: takes the place of the final norm that stock Megatron chooses for itself.
        device: on "cuda" the layers are Transformer Engine's.
    """
    with (
        rank_grid(parallel, device) as grid,
        mock.patch.object(transformer_block, "LayerNormImpl", norm or transformer_block.LayerNormImpl),
    ):
        seed_everything(0)
        (ours,) = build_stages(model, parallel, grid, dtype=torch.float32, seed=3)
        stock = stock_model(model, parallel, spec, has_engine=device == "cuda")
        of_stock = {own_name(name): name for name in stock.state_dict()} if spec == STACK_SPEC else {}
        stock.load_state_dict({of_stock.get(name, name): value for name, value in ours.state_dict().items()})
        numbers = numbers_of(stock)
        if of_stock:
            numbers = {own_name(name): value for name, value in numbers.items()}
        norms = [getattr(m.decoder, "final_norm", None) or m.decoder.final_layernorm for m in (stock, ours)]
        return numbers, numbers_of(ours), [norm.eps for norm in norms]


def assert_same(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert stock.keys() == ours.keys()
    for name, value in ours.items():
        difference = (stock[name] - value).abs().max()
        assert difference <= SAME * value.abs().max(), name
    fan = [value for name, value in stock.items() if ".fan." in name]
    assert len(fan) == 2 * MODEL.num_layers  # weight and bias
    assert all(gradient.abs().max() > 0 for gradient in fan)


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (MODEL, SPEC),
        (dataclasses.replace(MODEL, num_query_groups=2, untie_embeddings_and_output_weights=True), SPEC),
        (MY_MODEL, MY_SPEC),
        pytest.param(MODEL, STACK_SPEC, marks=NEEDS_TRAINING),
    ],
    ids=["paper", "paper-grouped-untied", "own-module", "hybrid"],
)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_stock_megatron_computes_what_we_do(
    run_on_ranks: Any, model: FANformerConfig, spec: list[str], tensor_parallel: int
) -> None:
    for stock, ours, epsilons in run_on_ranks(
        tensor_parallel, stock_and_ours, model, layout(f"tp={tensor_parallel}"), spec
    ):
        assert_same(stock, ours)
        assert epsilons == [model.layernorm_epsilon] * 2


def test_sequence_parallel_in_stock_megatron(run_on_ranks: Any) -> None:
    """Our norm stands in for Transformer Engine's: stock Megatron's own choice without it refuses, as below."""
    for stock, ours, _ in run_on_ranks(2, stock_and_ours, MODEL, layout("tp=2,sp=true"), SPEC, RMSNorm):
        assert_same(stock, ours)


def stock_metadata() -> dict[str, Any]:
    """What stock Megatron-LM asks of a model that it saves; it stacks the layers' tensors along a first axis."""
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def save_as_stock(folder: str) -> dict[str, torch.Tensor]:
    """Save stock Megatron's model at tensor parallel size 2 in its own form; its losses."""
    parallel = layout("tp=2")
    with rank_grid(parallel, "cpu"):
        seed_everything(0)
        stock = stock_model(MODEL, parallel, SPEC)
        state = stock.sharded_state_dict(metadata=stock_metadata())
        save_state({"model": state}, Path(folder))
        with torch.no_grad():
            return stock(**batch())


def losses_of_loaded(folder: str, kind: str) -> tuple[torch.Tensor, set[str]]:
    """Losses of one rank's stock model or ours with the saved weights, and the names that the checkpoint has."""
    parallel = layout()
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(1)
        if kind == "stock":
            model = stock_model(MODEL, parallel, SPEC)
        else:
            (model,) = build_stages(MODEL, parallel, grid, dtype=torch.float32, seed=None, stage_type=GPTStage)
        sharded = {"model": model.sharded_state_dict(metadata=stock_metadata())}
        model.load_state_dict(megatron_versions.load(sharded, Path(folder), read_table(Path(folder)))["model"])
        from megatron.core.dist_checkpointing import load_tensors_metadata

        with torch.no_grad():
            return model(**batch()), set(load_tensors_metadata(folder))


LOSSES_OVER_LAYOUTS = 1e-5  # absolute, of losses of about 5.5: sums over 64 in float32, in another order


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_stock_checkpoint_loads_in_another_layout(run_on_ranks: Any, tmp_path: Path, kind: str) -> None:
    saved, _ = run_on_ranks(2, save_as_stock, str(tmp_path))
    ((loaded, names),) = run_on_ranks(1, losses_of_loaded, str(tmp_path), kind)
    torch.testing.assert_close(loaded, saved, atol=LOSSES_OVER_LAYOUTS, rtol=0)
    assert "decoder.layers.self_attention.fan.linear.weight" in names  # ours has one name a layer


def configurations(model: FANformerConfig, parallel: ParallelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `configuration_by_hand`, as Megatron's parser fills them and as our own configuration has them."""
    from megatron.training.arguments import core_transformer_config_from_args

    names = list(configuration_by_hand(model, parallel))
    args = parsed_arguments(command_line(model, parallel, SPEC), parallel.tensor_model_parallel_size)
    parsed = core_transformer_config_from_args(args)
    with rank_grid(parallel, "cpu") as grid:
        own = transformer_config(model, parallel, grid, torch.float32)
    return {name: getattr(parsed, name) for name in names}, {name: getattr(own, name) for name in names}


# fields in which our own configuration may differ: how a thing is computed, or (init_method_std) replaced
FREE_FIELDS = {
    "bias_activation_fusion",
    "use_te_activation_func",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "transformer_impl",
    "init_method_std",
    "batch_p2p_comm",
    "overlap_p2p_comm",
}


@NEEDS_TRAINING
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_parser_makes_our_configuration_of_the_flags(run_on_ranks: Any, sequence_parallel: bool) -> None:
    parallel = layout("tp=2", sequence_parallel=sequence_parallel)
    for model in (MODEL, dataclasses.replace(MODEL, num_query_groups=2)):
        by_hand = configuration_by_hand(model, parallel)
        for parsed, own in run_on_ranks(2, configurations, model, parallel):
            assert parsed == by_hand
            assert {n: own[n] for n in own.keys() - FREE_FIELDS} == {n: by_hand[n] for n in own.keys() - FREE_FIELDS}


def test_the_documentation_shows_these_flags_and_this_module() -> None:
    section = DOCUMENTATION.read_text().split(SECTION)[1].split("\n## ")[0]
    shown = section.replace("\\\n", " ").split()
    for flag in (*SPEC, *ARCHITECTURE, *WITHOUT_ENGINE, *WITHOUT_APEX):
        assert any(flag == word.strip("`,.;") for word in shown), flag
    assert (Path(__file__).parent / "my_fanformer.py").read_text() in section
