"""lm-eval's `hf` backend on an exported folder, by the example, offline."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.generate.making import write_export, write_tokenizer
from tests.small_runs import ROOT

ROUNDING = 1e-3  # log-likelihoods of tens, in float32, of batches padded otherwise


@torch.no_grad()
def log_likelihood(model, text, choice):
    """Of `choice` behind a space, by the model alone; the tokenizer's ids are code points."""
    ids = torch.tensor([[ord(character) for character in f"{text} {choice}"]])
    message = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return message[len(text) - 1 :].sum().item()


@pytest.mark.full  # lm-eval imports for twenty seconds
def test_the_scores_are_the_models_own(tmp_path):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    folder, results = tmp_path / "export", tmp_path / "results"
    write_export(folder, "fanformer-tied", write_tokenizer(tmp_path))
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": "", "HF_HOME": str(tmp_path / "home")}
    command = ["bash", ROOT / "examples" / "lm-eval.sh", folder, results, "--device", "cpu", "--batch_size", "3"]
    subprocess.run(command, env=environment, check=True)
    (scores,) = results.rglob("samples_continuations_*.jsonl")
    samples = [json.loads(line) for line in scores.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(samples) == 4
    for sample in samples:
        found = [float(response[0][0]) for response in sample["resps"]]
        expected = [log_likelihood(model, sample["doc"]["context"], choice) for choice in sample["doc"]["choices"]]
        assert found == pytest.approx(expected, abs=ROUNDING)
