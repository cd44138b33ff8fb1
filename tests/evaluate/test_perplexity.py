"""The loss of perplexity sets against transformers on the export; test_scoring.py has the layouts."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.evaluate.config import PerplexityConfig
from megatron_fanformer.evaluate.perplexity import SetLoss, perplexity_metrics, perplexity_of_sets
from megatron_fanformer.evaluate.perplexity_sets import SETS, PerplexitySet, find_sets, set_name
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.small_runs import RunOnRanks
from tests.tiny import tiny_model
from tests.token_pairs import write_token_pair
from tests.train.layouts import set_weights
from tests.whole_models import export_huggingface

MODEL = tiny_model(seq_length=32)
SAME_AS_TRANSFORMERS = 1e-6  # of a mean over a thousand losses in float32


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(MODEL, "megatron")
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def sets(folder: Path) -> list[PerplexitySet]:
    """The same tokens by each way of cutting: documents shorter and longer than a chunk."""
    found = []
    for chunking, chunk_tokens in (("tokens", None), ("documents", 21), ("rolling", 21)):
        config = PerplexityConfig(
            sets={chunking: [str(folder / "tokens")]}, chunking=chunking, chunk_tokens=chunk_tokens, eod_id=0
        )
        found += find_sets(config, seq_length=MODEL.seq_length, vocab_size=MODEL.vocab_size)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    generator = np.random.default_rng(0)
    documents = [[generator.integers(MODEL.vocab_size, size=size)] for size in (1, 2, 20, 21, 22, 95, 300, 401)]
    write_token_pair(folder / "tokens", documents)
    return folder


def measured(folder: Path) -> dict[str, SetLoss]:
    with rank_grid(ParallelConfig(), "cpu") as grid:
        seed_everything(0)
        stages = build_stages(MODEL, ParallelConfig(), grid, dtype=torch.float32, seed=None)
        set_weights(stages, grid, tensors())
        return perplexity_of_sets(stages, sets(folder), grid, batch_tokens=128)


def test_the_perplexity_is_that_of_transformers(folder: Path, tmp_path: Path, run_on_ranks: RunOnRanks) -> None:
    (found,) = run_on_ranks(1, measured, folder)
    export_huggingface(MODEL, tensors(), tmp_path / "export", dtype=torch.float32)
    model = FANformerForCausalLM.from_pretrained(tmp_path / "export")
    for each in sets(folder):
        losses: list[float] = []
        for piece in each.pieces():
            ids = torch.from_numpy(each.read(piece))
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1].double()
            losses += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()[-piece[3] :]
        assert found[each.name].tokens == len(losses)
        expected = math.exp(np.mean(losses))
        assert found[each.name].perplexity == pytest.approx(expected, rel=SAME_AS_TRANSFORMERS)


def test_a_groups_mean_is_that_of_perplexities() -> None:
    """By OLMo's names, and none for a group of which a set is missing."""
    names = [set_name("v3-small", name) for name in SETS["v3-small"]]
    losses = {
        name: SetLoss(loss=math.log(10 + number), tokens=1, bits_per_byte=None) for number, name in enumerate(names)
    }
    metrics = perplexity_metrics(losses)
    assert metrics["eval/v3-small-dolma_common-crawl-validation/CrossEntropyLoss"] == math.log(12)
    assert metrics["eval/v3-small-c4_en-validation/Perplexity"] == pytest.approx(10)
    assert metrics["eval/v3-small/Perplexity"] == pytest.approx(15)
    assert not any(name.startswith("eval/v2-small") for name in metrics)
    del losses[names[0]]
    assert "eval/v3-small/Perplexity" not in perplexity_metrics(losses)
