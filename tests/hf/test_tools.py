"""Other tools on an export: pipelines, Trainer, accelerate, compilers, quantisers, ONNX. Each is skipped where missing.

docs/other-tools.md is the list of them, with the versions that these tests were run with.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, QuantoConfig, TorchAoConfig, pipeline

from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.hf import FANformerForCausalLM
from tests.generate.making import write_export, write_tokenizer
from tests.hf.models import OWN_VALUES, build, some_ids

pytestmark = pytest.mark.full  # what most of them are for, the package, is not in the tested set

FLOAT32_LOGITS = 1e-4  # logits of order 10, summed in another order
PROMPTS = ["def f(x):", "class A", "x"]
INT8_LOGITS = 0.15  # relative, of weights drawn wide: 0.07 (torchao), 0.08 (quanto) and 0.11 (bitsandbytes) measured
STEPS = 8
PHASES_ASIDE = [".*fan.*", "lm_head"]
"""What quantisers leave out so that phases stay exact. A regular expression, since some of them see modules' names and
some those of weights; and the head, which they leave out by themselves only where nothing is named."""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_export(folder / "model", "fanformer-tied", write_tokenizer(folder))
    return folder / "model"


def opened(folder: Path, **options: Any) -> FANformerForCausalLM:
    model: FANformerForCausalLM = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()


@torch.no_grad()
def test_a_pipeline_generates_in_batches_what_the_model_generates_alone(export: Path) -> None:
    model, tokenizer = opened(export), AutoTokenizer.from_pretrained(export)
    generator = pipeline("text-generation", model=str(export), trust_remote_code=True, device="cpu")
    answers = generator(PROMPTS, max_new_tokens=8, do_sample=False, batch_size=3)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert answer["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_trainer_fine_tunes_an_export(export: Path, tmp_path: Path) -> None:
    """Rows are equal, so that the first loss told, of four of them in two parts, is the model's own of one."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model, ids = opened(export), torch.randint(2, 250, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = model(ids[None], labels=ids[None]).loss.item()
    settings = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    rows = [{"input_ids": ids, "labels": ids}] * (4 * STEPS)
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and losses[0] == pytest.approx(first, abs=1e-3) and losses[-1] < 0.9 * first
    trainer.save_model(str(tmp_path / "tuned"))
    before, after = open_huggingface(export), open_huggingface(tmp_path / "tuned")
    assert after[0] == before[0] and after[1].keys() == before[1].keys()


@torch.no_grad()
def test_accelerate_keeps_a_layer_on_disk(export: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = opened(export)
    places: dict[str, str] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    layers = range(whole.config.num_hidden_layers)
    places |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in layers}
    spread = opened(export, device_map=places, offload_folder=str(tmp_path))
    assert spread.model.layers[1].self_attn.fan.weight.device.type == "meta"
    ids = some_ids()
    assert torch.equal(spread(ids).logits, whole(ids).logits)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.parametrize("fields", [{}, OWN_VALUES], ids=["qkv", "qk_and_v"])
def test_compiled_logits_and_gradients_are_those_of_the_model(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Inductor; tests/hf/test_generation.py holds that the graph is whole, with caches too."""
    # Its usual cache serves every instruction set, and what was compiled for another one fails.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()  # what other tests compiled counts against a limit
    model, ids = build(num_hidden_layers=1, **fields), some_ids()
    compiled = torch.compile(model, fullgraph=True)
    out = compiled(ids, labels=ids, use_cache=False)
    assert (out.logits - model(ids).logits).abs().max() < FLOAT32_LOGITS
    found = torch.autograd.grad(out.loss, list(model.parameters()))
    exact = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def quantiser(name: str, left_out: list[str] | None) -> Any:
    """transformers' configuration of it, for int8 weights."""
    if name == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        return TorchAoConfig(quantization.Int8WeightOnlyConfig(), modules_to_not_convert=left_out)
    if name == "quanto":
        pytest.importorskip("optimum.quanto")
        return QuantoConfig(weights="int8", modules_to_not_convert=left_out)
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=left_out)


def quantised(model: nn.Module) -> set[str]:
    """Last names of the maps that are no longer plain ones."""
    maps = {name: module for name, module in model.named_modules() if name.endswith(("proj", "fan", "lm_head"))}
    return {
        name.rpartition(".")[2]
        for name, module in maps.items()
        if not (type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.is_floating_point())
    }


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["torchao", "bitsandbytes", "quanto"])
@torch.no_grad()
def test_quantised_weights_give_near_logits_and_may_leave_the_phases_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = build(hidden_size=128, intermediate_size=256, **OWN_VALUES)
    model.save_pretrained(tmp_path)
    exact, options = model(some_ids()).logits, {"device_map": "cpu", "dtype": torch.float32}
    every = opened(tmp_path, quantization_config=quantiser(name, None), **options)
    some = opened(tmp_path, quantization_config=quantiser(name, PHASES_ASIDE), **options)
    matrices = {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (quantised(every), quantised(some)) == (matrices | {"fan", "v_fan"}, matrices)
    assert torch.equal(some.model.layers[0].self_attn.fan.weight, model.model.layers[0].self_attn.fan.weight)
    errors = [relative(each(some_ids()).logits, exact) for each in (every, some)]
    assert 0 < errors[1] <= errors[0] < INT8_LOGITS


class Logits(nn.Module):
    """What is exported: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, model: FANformerForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


@pytest.mark.parametrize("fields", [{}, OWN_VALUES], ids=["qkv", "qk_and_v"])
@torch.no_grad()
def test_onnx_runtime_computes_the_models_logits(fields: dict[str, Any], tmp_path: Path) -> None:
    """For other batches and lengths than that of the export, too."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, file = build(**fields), tmp_path / "model.onnx"
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(Logits(model), (some_ids(),), str(file), dynamo=True, input_names=["ids"], dynamic_shapes=sizes)
    session = runtime.InferenceSession(str(file))
    for ids in (some_ids(), some_ids(3, 7)):
        (logits,) = session.run(None, {"ids": ids.numpy()})
        assert (torch.from_numpy(logits) - model(ids).logits).abs().max() < FLOAT32_LOGITS
