"""transformers' pipeline and Trainer on an export; docs/other-tools.md has other tools, tried by hand."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from megatron_fanformer.convert.huggingface import open_huggingface
from tests.generate.making import write_export, write_tokenizer

PROMPTS = ["def f(x):", "class A", "x"]
STEPS = 8


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_export(folder / "model", "fanformer-tied", write_tokenizer(folder))
    return folder / "model"


@torch.no_grad()
def test_a_pipeline_generates_in_batches_what_the_model_generates_alone(export: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    generator = pipeline("text-generation", model=str(export), trust_remote_code=True, device="cpu")
    answers = generator(PROMPTS, max_new_tokens=8, do_sample=False, batch_size=3)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert answer["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.mark.full  # needs accelerate, which is not in the tested set
def test_trainer_fine_tunes_an_export(export: Path, tmp_path: Path) -> None:
    """Rows are equal, so that the first loss told, of four of them in two parts, is the model's own of one."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(export)
    ids = torch.randint(2, 250, (24,), generator=torch.Generator().manual_seed(0))
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
