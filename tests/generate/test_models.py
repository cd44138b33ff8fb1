"""Loaded models: the same logits from every form of a model, with and without the key/value cache."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megatron_fanformer.generate.models import find_model, find_model_and_tokenizer
from tests.generate.making import all_logits, cached_logits, logits_read_on, with_model, write_checkpoint
from tests.train.layouts import REFERENCE

PROMPT_IDS = [7, 99, 3, 200, 41]


def test_logits_are_the_references_without_vocabulary_padding(run_folder, run_on_ranks):
    expected = load_file(REFERENCE / "fanformer-tied" / "expected.safetensors")
    (found,) = run_on_ranks(1, with_model, run_folder, all_logits, expected["input_ids"].tolist())
    assert torch.allclose(torch.tensor(found), expected["logits"][..., :250], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["fanformer-tied", "fanformer-untied-p0125", "transformer-tied", "grouped-queries"])
def test_the_cache_gives_the_logits_of_a_whole_pass(case, tmp_path, tokenizer_file, run_on_ranks):
    run_on_ranks(1, write_checkpoint, tmp_path, case, tokenizer_file)
    ids = [[7, 99, 3, 200, 41, 5, 6, 149], [1, 2, 3, 4, 5, 6, 7, 8]]
    (whole,) = run_on_ranks(1, with_model, tmp_path, all_logits, ids)
    (cached,) = run_on_ranks(1, with_model, tmp_path, cached_logits, ids, 3)
    assert torch.allclose(torch.tensor(cached), torch.tensor(whole)[:, 2:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("masks_behind_cache", [True, False], ids=["together", "one by one"])
def test_several_tokens_behind_the_cache_see_their_past_alone(masks_behind_cache, run_folder, run_on_ranks):
    ids = [[7, 99, 3, 200, 41, 5, 6, 149], [1, 2, 3, 4, 5, 6, 7, 8]]
    others = [[*row[:4], row[0], row[0]] for row in ids]
    (whole,) = run_on_ranks(1, with_model, run_folder, all_logits, ids)
    (branch,) = run_on_ranks(1, with_model, run_folder, all_logits, others)
    (found,) = run_on_ranks(1, with_model, run_folder, logits_read_on, ids, masks_behind_cache)
    expected = torch.stack([torch.tensor(whole)[:, 2], torch.tensor(branch)[:, 5], torch.tensor(whole)[:, 7]], dim=1)
    assert torch.allclose(torch.tensor(found), expected, rtol=0, atol=2e-5)


def test_bf16_weights_are_computed_with_in_float32_on_a_cpu(tmp_path, run_folder, tokenizer_file, run_on_ranks):
    run_on_ranks(1, write_checkpoint, tmp_path, "fanformer-tied", tokenizer_file, "bf16")
    assert find_model(tmp_path).dtype == torch.bfloat16
    (rounded,) = run_on_ranks(1, with_model, tmp_path, all_logits, [PROMPT_IDS])
    (exact,) = run_on_ranks(1, with_model, run_folder, all_logits, [PROMPT_IDS])
    rounded, exact = torch.tensor(rounded), torch.tensor(exact)
    assert not torch.equal(rounded, exact)
    assert not torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - exact).norm() < 0.02 * exact.norm()  # of weights of 8 bits


def test_an_export_states_what_ends_its_documents(exported_folder, tmp_path):
    folder = shutil.copytree(exported_folder, tmp_path / "export")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "eos_token_id": 97}))
    found = [find_model_and_tokenizer(str(path))[1].eod_id for path in (exported_folder, folder)]
    assert found == [stated["eos_token_id"], 97] and found[0] != 97
    source, tokenizer = find_model_and_tokenizer(str(folder), eod_id=98)
    assert source.end_of_text_id == tokenizer.eod_id == 98
