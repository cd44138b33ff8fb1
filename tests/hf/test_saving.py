"""What `save_pretrained` writes opens where this package is not installed."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_fanformer.hf import configuration_fanformer
from tests.hf.models import OWN_VALUES, build, some_ids

# What a stranger runs: nothing of ours can be imported, and nothing can be fetched.
STRANGER = """
import sys
sys.modules["megatron_fanformer"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[5, 6, 7]])
print(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.full  # as tests/convert does with an export, in every run
def test_a_stranger_opens_it_and_saves_it_again(tmp_path: Path) -> None:
    model = build(**OWN_VALUES)
    model.save_pretrained(tmp_path / "once")
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", STRANGER, tmp_path / "once", tmp_path / "twice"]
    out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    ids = torch.tensor([[5, 6, 7]])
    assert out.stdout.split("\n")[0] == str(
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    )
    files = {"config.json", "configuration_fanformer.py", "modeling_fanformer.py", "model.safetensors"}
    assert files <= {path.name for path in (tmp_path / "twice").iterdir()}
    once, twice = (load_file(tmp_path / folder / "model.safetensors") for folder in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    build(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_large_models_are_saved_in_shards(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(type(model).from_pretrained(tmp_path)(some_ids()).logits, model(some_ids()).logits)


@pytest.mark.parametrize("installed", ["4.57.6", "5.3.0.dev0"])
def test_an_older_transformers_is_told_which_one_it_needs(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first file of an export that is read, before it uses anything that is new."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)  # which it may have put there itself
    needed = f"needs transformers {configuration_fanformer.OLDEST_TRANSFORMERS} or later, and {installed} is installed"
    with pytest.raises(ImportError, match=re.escape(needed)):
        runpy.run_path(configuration_fanformer.__file__)


def test_a_newer_transformers_than_was_tested_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = configuration_fanformer.NEWEST_TRANSFORMERS
    major, minor = map(int, newest.split("."))
    for installed, warned in ((f"{newest}.9", 0), (f"{major}.{minor + 1}.0.dev0", 1)):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)
        with warnings.catch_warnings(record=True) as caught:
            runpy.run_path(configuration_fanformer.__file__)
        assert sum(newest in str(each.message) for each in caught) == warned
