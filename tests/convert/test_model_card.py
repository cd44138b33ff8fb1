"""The model card of an export: what it says of a run, and that it says nothing that is not known."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import versions, write_manifest
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.model_card import Extras, model_card
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.train import metrics
from tests.conftest import REFERENCE
from tests.small_runs import small_run, write_tokens
from tests.tiny import tiny_model
from tests.train.test_trainer import train

MODEL = tiny_model()


@pytest.fixture(scope="module")
def trained(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at tensor parallel 2, saved after the third and the last, evaluated after each second."""
    folder = tmp_path_factory.mktemp("trained")
    tokens = write_tokens(folder / "tokens")
    values = small_run(
        tokens,
        folder / "run",
        parallel={"tensor_model_parallel_size": 2},
        schedule={"lr_warmup_iters": 2},
        data={"train_data": ["0.7", tokens, "0.3", tokens], "valid_data": {"held-out": [tokens], "a|b": [tokens]}},
        training={"train_iters": 6, "eval_interval": 2, "eval_iters": 1, "seed": 7},
        checkpoint={"save_interval": 3},
    )
    run_on_ranks(2, train, values)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def card_of(source: Path, tmp_path: Path, **options: Any) -> str:
    convert_checkpoint(source, tmp_path / "out", to="hf", verified=False, **options)
    return (tmp_path / "out" / "README.md").read_text()


def rows_of(card: str) -> dict[str, str]:
    """The rows of the card's table of the training, by their names."""
    lines = [line for line in card.splitlines() if line.startswith("| ")]
    return dict(line.strip("| ").split(" | ", 1) for line in lines[1:])


def logged(run: Path, step: int) -> dict[str, float]:
    return next(entry for entry in metrics.read_metrics(run) if entry["step"] == step)


def test_a_run_is_summed_up(trained: Path, tmp_path: Path) -> None:
    last = logged(trained, 6)
    assert rows_of(card_of(trained, tmp_path)) == {
        "steps": "6",
        "tokens": "384",
        "training loss": f"{last['loss']:.4f} nats per token, at step 6",
        "validation loss, held-out": f"{last['validation_loss/held-out']:.4f} nats per token, at step 6",
        r"validation loss, a\|b": f"{last['validation_loss/a|b']:.4f} nats per token, at step 6",
        "global batch": "4 sequences of 16 tokens",
        "peak learning rate": "0.01; cosine after 2 steps of warm-up",
        "layout": "tp 2, cp 1, pp 1, dp 1; distributed optimizer; fp32 on cpu",
        "seed": "7",
        "training data": "0.7, tokens, 0.3, tokens",
        "validation data, held-out": "tokens",
        r"validation data, a\|b": "tokens",
    }


def test_an_earlier_checkpoint_has_the_losses_of_its_own_step(trained: Path, tmp_path: Path) -> None:
    rows = rows_of(card_of(trained / run_folder.CHECKPOINTS / "step-00000003", tmp_path))
    assert (rows["steps"], rows["tokens"]) == ("3 of 6 planned", "192")
    assert rows["training loss"] == f"{logged(trained, 3)['loss']:.4f} nats per token, at step 3"
    validation = logged(trained, 2)["validation_loss/held-out"]
    assert rows["validation loss, held-out"] == f"{validation:.4f} nats per token, at step 2"


@pytest.mark.parametrize(
    "content", [None, "", '{"step": 5, "loss": 3.0}\n', '{"step": 6, "loss": NaN}\n', "[6]\n\xff{"]
)
def test_losses_that_are_not_known_are_not_invented(content: str | None, run: Path, tmp_path: Path) -> None:
    (run / metrics.METRICS).unlink()
    if content is not None:
        (run / metrics.METRICS).write_text(content, encoding="latin-1")
    rows = rows_of(card_of(run, tmp_path))
    assert rows["losses"] == "not known: the run's metrics.jsonl was not available, or has no step 6"
    assert not any("loss," in name or name == "training loss" for name in rows)


def test_the_weights_that_a_run_started_from_are_told(run: Path, tmp_path: Path) -> None:
    change_config(run, lambda saved: saved["checkpoint"].update(load="/home/me/runs/base"))
    assert rows_of(card_of(run, tmp_path))["started from"].startswith("the weights of base, whose own training is not")


def test_a_configuration_cannot_write_markdown(run: Path, tmp_path: Path) -> None:
    change_config(run, lambda saved: saved["training"].update(seed="1 |\n# Title <script>`"))
    change_config(run, lambda saved: saved["data"].update(train_data="not a list"))
    rows = rows_of(card_of(run, tmp_path))
    assert rows["seed"] == r"1 \| # Title \<script\>\`" and "training data" not in rows


def change_config(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = find_checkpoint(run) / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    change(saved)
    file.write_text(yaml.safe_dump(saved))
    write_manifest(file.parent, run_folder.step_of(file.parent) or 0)


@pytest.mark.parametrize("form", ["reference", "megatron", "hf"])
def test_nothing_is_invented_of_converted_weights(form: str, tmp_path: Path) -> None:
    source = REFERENCE / "fanformer-tied"
    if form != "reference":
        convert_checkpoint(source, tmp_path / form, to=form, verified=False)  # type: ignore[arg-type]
        source = tmp_path / form
    card = card_of(source, tmp_path)
    origin = {"reference": "the authors' format", "megatron": "converted weights", "hf": "a Hugging Face folder"}
    assert f"Not known: the weights were converted from {'a' if form == 'hf' else 'a checkpoint'}" in card
    assert origin[form] in card and "\n| " not in card and "trained with megatron-fanformer" not in card


def test_the_card_tells_how_the_conversion_went(tmp_path: Path) -> None:
    convert_checkpoint(REFERENCE / "fanformer-tied", tmp_path / "verified", to="hf")
    verified = (tmp_path / "verified" / "README.md").read_text()
    assert "The receipt, [receipt.json](receipt.json), is in this folder." in verified
    receipt = json.loads((tmp_path / "verified" / "receipt.json").read_text())
    assert receipt["passed"] is True
    assert f"differ by at most {receipt['checks']['logits']['max_abs_error']:.1e}" in verified
    assert f"torch {versions()['torch']}" in verified
    assert "was not verified: there is no receipt" in card_of(REFERENCE / "fanformer-tied", tmp_path)


def test_a_name_is_text_in_the_card_and_a_word_in_its_commands() -> None:
    card = model_card(MODEL, Extras(name="a <script>b</script> $(c)", tokenizer=Path("t.json")))
    assert r"# a \<script\>b\</script\> $(c)" in card.splitlines()
    assert "--model_args 'pretrained=a <script>b</script> $(c),trust_remote_code=True' --tasks" in card
