"""Adapters on every linear map of the model, FAN's among them: as peft puts them there, trained, merged, converted."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.hf import FANformerForCausalLM
from tests.hf.models import OWN_VALUES, build, some_ids

RANK = 2
FLOAT32_LOGITS = 2e-5  # (W + B A) x against W x + B (A x), logits of order 10
OF_A_LAYER = {"fan", "v_fan", "q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Adapted(nn.Module):
    """W x + B (A x), in the place of a linear map."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(0.1 * torch.randn(RANK, linear.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(linear.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


@torch.no_grad()
def test_every_matrix_is_a_linear_map_that_can_be_replaced() -> None:
    """What stands in for it computes the product alone: the merged weights give the same logits."""
    model = build(**OWN_VALUES)
    merged = copy.deepcopy(model)
    # Without the head, which peft's `all-linear` leaves out, and without subclasses, which bitsandbytes leaves out.
    maps = {name: module for name, module in model.model.named_modules(prefix="model") if type(module) is nn.Linear}
    assert {name.rpartition(".")[2] for name in maps} == OF_A_LAYER
    adapted = {name: Adapted(linear) for name, linear in maps.items()}
    for name, module in adapted.items():
        model.set_submodule(name, module)
        merged.get_submodule(name).weight += module.b @ module.a  # type: ignore[operator]
    assert (model(some_ids()).logits - merged(some_ids()).logits).abs().max() < FLOAT32_LOGITS
    fan_alone = copy.deepcopy(model)
    fan_alone.model.layers[0].self_attn.fan.b.zero_()
    assert (fan_alone(some_ids()).logits - model(some_ids()).logits).abs().max() > 1e-2


@pytest.mark.full
def test_peft_trains_fan_and_the_merged_model_converts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, ids = build(**OWN_VALUES), some_ids()
    before = copy.deepcopy(base.state_dict())
    # every rank with a B that is not zero, so that all weights change
    settings = peft.LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, settings).train()
    touched = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    assert touched == OF_A_LAYER
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = FANformerForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert (loaded(ids).logits - expected).abs().max() < 1e-4
    after = dict(open_huggingface(tmp_path)[1])  # what `convert` reads: the model's names, and no others
    assert after.keys() == before.keys() - {"lm_head.weight"}
    matrices = [name for name in after if name.split(".")[-2] in OF_A_LAYER and name.endswith("weight")]
    assert [name for name in matrices if torch.equal(after[name], before[name])] == []
