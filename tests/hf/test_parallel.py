"""transformers' own tensor and pipeline parallelism, on two gloo ranks, against one process."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers.distributed import DistributedConfig

from megatron_fanformer.hf import FANformerForCausalLM
from tests.hf.models import OWN_VALUES, build, some_ids

FLOAT32_LOGITS = 1e-4  # logits of order 10, summed in another order
RELATIVE_GRADIENT = 1e-5
PLACEMENTS = {
    "qkv": {},
    "qk_and_v": OWN_VALUES | {"tie_word_embeddings": False},
    "qk_and_v, multi-query": OWN_VALUES | {"num_key_value_heads": 1},
}
FFN = pytest.param({"fan_placement": "ffn"}, id="ffn", marks=pytest.mark.full)


pytestmark = pytest.mark.skipif(
    "pp_size" not in DistributedConfig.__dataclass_fields__, reason="this transformers has no pipeline stages yet"
)


def loaded(folder: Path, **degrees: int) -> FANformerForCausalLM:
    """transformers asks for `accelerate` before it spreads a model, but on CPUs makes no use of it."""
    with mock.patch("transformers.integrations.accelerate.is_accelerate_available", return_value=True):
        return FANformerForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**degrees)).eval()


def generated(model: FANformerForCausalLM) -> list[list[int]]:
    return model.generate(some_ids(), max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()


def tensor_parallel(folder: Path) -> dict:
    model = loaded(folder, tp_size=2)
    out = model(some_ids(), labels=some_ids())
    out.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    split = [name for name, grad in gradients.items() if hasattr(grad, "full_tensor")]
    return {"logits": out.logits.detach(), "tokens": generated(model), "gradients": whole, "split": split}


def pipeline_parallel(folder: Path) -> dict:
    model = loaded(folder, pp_size=2)
    with torch.no_grad():
        return {"logits": model(some_ids()).logits, "tokens": generated(model)}


@pytest.mark.parametrize("fields", [*(pytest.param(each, id=name) for name, each in PLACEMENTS.items()), FFN])
def test_two_tensor_parallel_ranks_equal_one_process(fields, tmp_path, run_on_ranks):
    model = build(vocab_size=62, **fields)
    model.save_pretrained(tmp_path)
    model(some_ids(), labels=some_ids()).loss.backward()
    for found in run_on_ranks(2, tensor_parallel, tmp_path):
        assert (found["logits"] - model(some_ids()).logits).abs().max() < FLOAT32_LOGITS
        assert found["tokens"] == generated(model)
        for name, weight in model.named_parameters():
            assert (found["gradients"][name] - weight.grad).norm() < RELATIVE_GRADIENT * weight.grad.norm(), name
        matrices = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
        assert len(matrices) > 6 and matrices <= set(found["split"])


@pytest.mark.parametrize("fields", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_two_pipeline_stages_equal_one_process(fields, tmp_path, run_on_ranks):
    model = build(vocab_size=62, **fields)
    model.save_pretrained(tmp_path)
    for found in run_on_ranks(2, pipeline_parallel, tmp_path):
        assert (found["logits"] - model(some_ids()).logits).abs().max() < FLOAT32_LOGITS
        assert found["tokens"] == generated(model)
