"""examples/quickstart.ipynb: as a file, and every cell of it, in order, on a small run and an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.generate.making import write_export, write_tokenizer
from tests.small_runs import ROOT, RunOnRanks, small_run, write_tokens
from tests.train.test_trainer import train

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
SAME_PHASES = 1e-5  # of order 1, in float32


def cells() -> list[dict[str, Any]]:
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = content["cells"]
    return found


def code_cells() -> dict[str, str]:
    return {cell["id"]: "".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"}


def test_the_notebook_is_one_without_what_was_run() -> None:
    assert len({cell["id"] for cell in cells()}) == len(cells())
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells() if "outputs" in cell)
    for name, source in code_cells().items():
        compile(source, name, "exec")


@pytest.mark.full  # a training run
def test_every_cell_runs(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    tokens = write_tokens(tmp_path / "tokens")
    data, training = {"valid_data": {"held-out": [tokens]}}, {"eval_interval": 10, "eval_iters": 1}
    values = small_run(tokens, tmp_path / "run", data={"train_data": [tokens], **data})
    values["training"] |= training
    run_on_ranks(1, train, values)
    write_export(tmp_path / "huggingface", "fanformer-tied", write_tokenizer(tmp_path))
    seen: dict[str, Any] = {}
    for name, source in code_cells().items():
        exec(compile(source, name, "exec"), seen)
        if name == "demo":
            seen["DEMO"] = tmp_path

    assert seen["text"].startswith("def read_lines(path):\n")
    assert seen["curves"] == {"loss", "validation_loss/held-out"}
    layer = seen["model"].model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(seen["model"].model.embed_tokens(seen["sample"]["input_ids"]))
        p = F.linear(x, layer.self_attn.fan.weight, layer.self_attn.fan.bias)[0, :, :16]
    assert seen["phases"].keys() == {0, 1, 2} and (seen["phases"][0] - p).abs().max() < SAME_PHASES
    assert len(set(seen["losses"]) | {seen["whole"]}) == 4 and seen["loss"]() == seen["whole"]
    assert len(pyplot.get_fignums()) == 2
    pyplot.close("all")
