"""Scores of tasks: log-probabilities against transformers and in every layout, metrics against plain arithmetic."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.evaluate import scoring
from megatron_fanformer.evaluate.config import SETS, PerplexityConfig, set_name
from megatron_fanformer.evaluate.results import SetResult
from megatron_fanformer.evaluate.rows import EMPTY, batches_of_rows
from megatron_fanformer.evaluate.scoring import (
    TaskScores,
    document_terms,
    log_probabilities,
    perplexity_metrics,
    perplexity_of_sets,
    set_result,
    task_metrics,
)
from megatron_fanformer.evaluate.survey import PerplexitySet, find_sets
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import DEFAULT_KERNELS, KernelsConfig
from megatron_fanformer.model.layouts import parse_layout
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.evaluate.made_up import made_up_requests, made_up_tasks
from tests.parity.test_matrix import FAN_RECOMPUTED, LAYOUTS, LOSSES, MORE_LAYOUTS
from tests.small_runs import RunOnRanks
from tests.tiny import tiny_model
from tests.token_pairs import write_token_pair
from tests.train.layouts import gather, set_weights, shards_of
from tests.whole_models import export_huggingface

SAME_AS_TRANSFORMERS = 1e-4  # nats, of up to eight tokens, in float32
MODEL = tiny_model(num_layers=4, seq_length=48)
SAME_IN_LAYOUTS = 2 * LOSSES  # of one request, not the mean of many: 1.2e-5 seen (tp=4, MKL on an AMD CPU)
SOME_LAYOUTS = ("tp=2,sp=true,fan=sequence", "cp=2", "pp=2,vpp=2", "dp=2")
"""Of two ranks: each way of spreading a row, a layer or the requests once."""


def tasks() -> list[Any]:
    made = made_up_tasks(MODEL.vocab_size, MODEL.seq_length + 1)
    return [*made.values(), made["hellaswag"].unconditional]


def build(parallel: ParallelConfig, grid: Any, kernels: KernelsConfig = DEFAULT_KERNELS) -> list[Any]:
    """The stages of one model whatever the layout: its weights are large, so that tokens differ in likelihood."""
    seed_everything(0)
    stages = build_stages(MODEL, parallel, grid, dtype=torch.float32, seed=5, kernels=kernels)
    with torch.no_grad():
        for stage in stages:
            for weight in stage.parameters():
                weight.mul_(2 if weight.ndim > 1 else 1)
    return stages


def scores(layouts: Sequence[str]) -> list[list[np.ndarray]]:
    """Of all tasks, in each layout; on every rank."""
    found = []
    for layout in layouts:
        parallel, kernels = parse_layout(layout).parallel, parse_layout(layout).kernels
        with rank_grid(parallel, "cpu") as grid:
            found.append(log_probabilities(build(parallel, grid, kernels), tasks(), grid, batch_tokens=256))
    return found


@pytest.fixture(scope="module")
def alone(rank_pool: Any) -> list[np.ndarray]:
    return rank_pool.run(1, scores, ["tp=1"])[0][0]


def same_in(layouts: Sequence[str], ranks: int, run_on_ranks: RunOnRanks, alone: list[np.ndarray]) -> None:
    for of_rank in run_on_ranks(ranks, scores, layouts):
        for layout, found in zip(layouts, of_rank, strict=True):
            for task, own, expected in zip(tasks(), found, alone, strict=True):
                np.testing.assert_allclose(own, expected, rtol=SAME_IN_LAYOUTS, err_msg=f"{task.name}, {layout}")
                assert choices(task, own) == choices(task, expected), (task.name, layout)


def choices(task: Any, values: np.ndarray) -> list[int]:
    per_token = values / task.continuation_tokens
    return [int(per_token[task.documents == document].argmax()) for document in np.unique(task.documents)]


def test_the_same_in_layouts_of_two_ranks(run_on_ranks: RunOnRanks, alone: list[np.ndarray]) -> None:
    same_in(SOME_LAYOUTS, 2, run_on_ranks, alone)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_same_in_every_layout_of_parity(run_on_ranks: RunOnRanks, alone: list[np.ndarray], ranks: int) -> None:
    every = [*LAYOUTS, *FAN_RECOMPUTED, *(text for text in MORE_LAYOUTS if "num_layers_in_first" not in text)]
    layouts = [text for text in every if parse_layout(text).world_size == ranks]
    assert layouts
    same_in(layouts, ranks, run_on_ranks, alone)


def export(folder: Path) -> None:
    parallel = ParallelConfig()
    with rank_grid(parallel, "cpu") as grid:
        whole = gather([shards_of(build(parallel, grid), grid)])
        export_huggingface(MODEL, whole, folder, dtype=torch.float32)


def test_equal_to_transformers_on_the_export(run_on_ranks: RunOnRanks, alone: list[np.ndarray], tmp_path: Path) -> None:
    run_on_ranks(1, export, tmp_path / "hf")
    model = FANformerForCausalLM.from_pretrained(tmp_path / "hf").eval()
    for task, own in zip(tasks(), alone, strict=True):
        expected = np.array([by_transformers(model, task, request) for request in range(len(task))])
        assert np.abs(own - expected).max() < SAME_AS_TRANSFORMERS
        assert choices(task, own) == choices(task, expected)
        assert np.ptp(own) > 1  # else anything would be near


@torch.no_grad()
def by_transformers(model: Any, task: Any, request: int) -> float:
    """One request, by itself: the sum over its continuation of the logits' log softmax."""
    ids = torch.from_numpy(task.ids[task.offsets[request] : task.offsets[request + 1]]).long()
    start = len(ids) - int(task.continuation_tokens[request])
    log_softmax = model(ids[None, :-1]).logits[0].double()[:, : MODEL.vocab_size].log_softmax(-1)
    return float(log_softmax[start - 1 :].gather(1, ids[start:, None]).sum())


def score_one_by_one() -> list[np.ndarray]:
    with rank_grid(ParallelConfig(), "cpu") as grid:
        stages = build(ParallelConfig(), grid)
        return [log_probabilities(stages, [task], grid, batch_tokens=1)[0] for task in tasks()]


def test_batches_and_tasks_scored_together_change_nothing(run_on_ranks: RunOnRanks, alone: list[np.ndarray]) -> None:
    for own, expected in zip(run_on_ranks(1, score_one_by_one)[0], alone, strict=True):
        np.testing.assert_allclose(own, expected, rtol=LOSSES)


# -- batches


def grid_of(*, replicas: int = 1, pipeline: int = 1, tensor: int = 1, context: int = 1) -> Any:
    sizes = {"tp": tensor, "cp": context, "pp": pipeline}
    groups = SimpleNamespace(**{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()})
    return SimpleNamespace(groups=groups, data_parallel_size=replicas, context_parallel_size=context)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ({}, 1),
        ({"replicas": 3}, 1),
        ({"pipeline": 2, "replicas": 2}, 1),
        ({"pipeline": 3}, 2),
        ({"tensor": 3, "context": 2}, 1),
    ],
)
def test_every_row_is_in_one_batch_that_its_layout_can_take(rows: int, sizes: dict[str, int], chunks: int) -> None:
    grid = grid_of(**sizes)
    stages = [SimpleNamespace(config=SimpleNamespace(sequence_parallel=True, fp8=None))] * chunks
    lengths = np.random.default_rng(rows).integers(2, 200, size=rows)
    batches = list(batches_of_rows(lengths, stages, grid, batch_tokens=512))
    taken = np.concatenate([batch.rows.flatten() for batch in batches])
    assert sorted(taken[taken != EMPTY]) == list(range(rows))
    for batch in batches:
        replicas, count, size = batch.rows.shape
        assert replicas == grid.data_parallel_size
        assert chunks == 1 or count % grid.groups.pp.size() == 0
        context = grid.context_parallel_size
        assert batch.seq_length % (grid.groups.tp.size() * context) == 0
        assert context == 1 or batch.seq_length % (2 * context) == 0
        assert size == 1 or size * batch.seq_length <= 512
        longest = max(lengths[row] for row in batch.rows.flatten() if row != EMPTY)
        assert longest - 1 <= batch.seq_length


def test_requests_of_the_same_ids_are_one_row_only_where_they_score_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = np.array([3, 5, 7, 3, 5, 7, 3, 5, 7, 3, 5], dtype=np.int32)
    task: Any = SimpleNamespace(ids=ids, offsets=np.array([0, 3, 6, 9, 11]), continuation_tokens=np.array([1, 3, 1, 1]))

    def losses_of_rows(_stages: Any, lengths: np.ndarray, _read: Any, _grid: Any, **options: Any) -> np.ndarray:
        assert (lengths.tolist(), options["scored"].tolist()) == ([3, 3, 2], [1, 3, 1])
        return np.arange(3.0)

    monkeypatch.setattr(scoring, "losses_of_rows", losses_of_rows)
    (found,) = log_probabilities([], [task], SimpleNamespace(), batch_tokens=1)
    assert found.tolist() == [0, -1, 0, -2]


# -- metrics

CHOICES = [2, 4, 3, 1, 5, 2, 2, 3] * 5
EXACT = 1e-12
DRAWS, SPREAD = 4000, 0.05  # a standard deviation of 4,000 draws is known to 1.1%


def random_scores(requests, seed=1):
    return -np.random.default_rng(seed).exponential(20.0, len(requests))


def plainly(requests, scores, unconditional):
    """The metrics of each document, one after the other: {name: [a value each]}."""
    found: dict[str, list[float]] = {}
    for document in dict.fromkeys(requests.documents.tolist()):
        of_it = [i for i in range(len(requests)) if requests.documents[i] == document]
        right = next(i for i in of_it if requests.choices[i] == requests.labels[i])
        length = {name: values.tolist() for name, values in requests.lengths.items()}
        ways = {
            "acc": {i: scores[i] for i in of_it},
            "len_norm": {i: scores[i] / length["characters_no_space"][i] for i in of_it},
            "len_norm_with_space": {i: scores[i] / length["characters"][i] for i in of_it},
            "per_token": {i: scores[i] / requests.continuation_tokens[i] for i in of_it},
            "pmi": {i: scores[i] - unconditional[i] for i in of_it},
        }
        values = {name: float(max(of_it, key=way.__getitem__) == right) for name, way in ways.items()}
        values["bpb"] = -scores[right] / length["bytes_no_space"][right] / math.log(2)
        values["bpb_with_space"] = -scores[right] / length["bytes"][right] / math.log(2)
        values["ce_loss"] = -scores[right] / length["characters_no_space"][right]
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def test_metrics_are_plain_means_with_their_standard_errors():
    requests = made_up_requests(CHOICES)
    scores, unconditional = random_scores(requests), random_scores(requests, seed=2)
    found = task_metrics(requests, TaskScores(scores, unconditional))
    expected = plainly(requests, scores, unconditional)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].documents == len(CHOICES)
        assert found[name].value == pytest.approx(np.mean(values), rel=EXACT), name
        assert found[name].standard_error == pytest.approx(np.std(values) / math.sqrt(len(values)), rel=EXACT), name
    p = found["acc"].value
    assert 0 < p < 1
    assert found["acc"].standard_error == pytest.approx(math.sqrt(p * (1 - p) / len(CHOICES)), rel=EXACT)


def test_a_task_of_one_answer_has_the_metrics_of_the_answer_alone():
    requests = made_up_requests([1] * 9, metric="bpb")
    found = task_metrics(requests, TaskScores(np.full(9, -2.0)))
    assert found.keys() == set(OF_ONE_ANSWER)
    assert found["bpb"].value == pytest.approx(
        np.mean(2.0 / math.log(2) / requests.lengths["bytes_no_space"]), rel=EXACT
    )


def test_f1_is_of_the_first_choice_and_its_error_that_of_resampled_documents():
    requests = made_up_requests([2] * 300, metric="f1", seed=5)
    scores = random_scores(requests)
    found = task_metrics(requests, TaskScores(scores))["f1"]
    predicted, labels = scores.reshape(-1, 2).argmax(axis=1), requests.labels[::2]
    hits = np.sum((predicted == 0) & (labels == 0))
    precision, recall = hits / np.sum(predicted == 0), hits / np.sum(labels == 0)
    assert found.value == pytest.approx(2 * precision * recall / (precision + recall), rel=EXACT)
    drawn = np.random.default_rng(0).integers(0, 300, (DRAWS, 300))
    numerators, denominators = document_terms(requests, TaskScores(scores))["f1"][drawn].sum(axis=1).T
    assert found.standard_error == pytest.approx(np.std(numerators / denominators), rel=SPREAD)


def test_a_continuation_without_length_is_never_chosen():
    requests = made_up_requests([2])
    requests.labels[:] = 1
    requests.lengths["characters_no_space"][:] = [0, 5]
    assert task_metrics(requests, TaskScores(np.array([-0.1, -50.0])))["len_norm"].value == 1.0


# -- perplexity sets

SET_MODEL = tiny_model(seq_length=32)
SAME_PERPLEXITY = 1e-6  # of a mean over a thousand losses in float32


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(SET_MODEL, "megatron")
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def sets(folder: Path) -> list[PerplexitySet]:
    config = PerplexityConfig(sets={"own": [str(folder / "tokens")]}, chunk_tokens=21)
    return find_sets(config, seq_length=SET_MODEL.seq_length, vocab_size=SET_MODEL.vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    generator = np.random.default_rng(0)
    documents = [[generator.integers(SET_MODEL.vocab_size, size=size)] for size in (1, 2, 20, 21, 22, 95, 300, 401)]
    write_token_pair(folder / "tokens", documents)
    return folder


def measured(folder: Path) -> dict[str, SetResult]:
    with rank_grid(ParallelConfig(), "cpu") as grid:
        seed_everything(0)
        stages = build_stages(SET_MODEL, ParallelConfig(), grid, dtype=torch.float32, seed=None)
        set_weights(stages, grid, random_tensors())
        return perplexity_of_sets(stages, sets(folder), grid, batch_tokens=128)


def test_the_perplexity_is_that_of_transformers(folder: Path, tmp_path: Path, run_on_ranks: RunOnRanks) -> None:
    (found,) = run_on_ranks(1, measured, folder)
    export_huggingface(SET_MODEL, random_tensors(), tmp_path / "export", dtype=torch.float32)
    model = FANformerForCausalLM.from_pretrained(tmp_path / "export")
    (own,) = sets(folder)
    losses: list[float] = []
    for chunk in own.chunks():
        ids = torch.from_numpy(own.read(chunk))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].double()
        losses += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()
    assert found["own"].tokens == len(losses)
    assert found["own"].perplexity == pytest.approx(math.exp(np.mean(losses)), rel=SAME_PERPLEXITY)


def test_a_groups_mean_is_that_of_perplexities() -> None:
    """By OLMo's names, and none for a group of which a set is missing."""
    names = [set_name("v3-small", name) for name in SETS["v3-small"]]
    losses = {name: set_result(math.log(10 + number), 1) for number, name in enumerate(names)}
    metrics = perplexity_metrics(losses)
    assert metrics["eval/v3-small-dolma_common-crawl-validation/CrossEntropyLoss"] == math.log(12)
    assert metrics["eval/v3-small-c4_en-validation/Perplexity"] == pytest.approx(10)
    assert metrics["eval/v3-small/Perplexity"] == pytest.approx(15)
    assert not any(name.startswith("eval/v2-small") for name in metrics)
    del losses[names[0]]
    assert "eval/v3-small/Perplexity" not in perplexity_metrics(losses)
