"""Evaluation in the loop: what it measures, that it changes nothing, and that it stops when asked to."""

import hashlib
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import InputError, Interrupted
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import find_metric, read_metrics
from megatron_fanformer.train.preflight import find_start
from tests import small_runs
from tests.evaluate.made_up import made_up_tasks, write_made_up
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, RunOnRanks, small_run

SAME_SCORES = 1e-4  # relative, after some steps in another order of summation
TASKS = ["copa", "hellaswag", "mrpc"]
NAMES = {
    "validation_loss/held-out",
    "eval/own-set/CrossEntropyLoss",
    "eval/own-set/Perplexity",
    "eval/own-set/BitsPerByte",
    "eval/downstream/copa_acc",
    "eval/downstream/hellaswag_len_norm",
    "eval/downstream/mrpc_f1",
    *(f"eval/downstream_bpb/{task}_bpb" for task in TASKS),
    "evaluation_seconds",
}


@pytest.fixture
def requests(tmp_path: Path, olmo_tokenizer_file: Path) -> str:
    digest = hashlib.sha256(olmo_tokenizer_file.read_bytes()).hexdigest()
    made = made_up_tasks(VOCAB_SIZE, SEQ_LENGTH + 1)
    return write_made_up(tmp_path / "made-up.requests", made, tokenizer_sha256=digest, context_length=SEQ_LENGTH)


@pytest.fixture
def evaluated(tokens: str, requests: str, olmo_tokenizer_file: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run that evaluates everything there is, each third step."""
    return {
        "data": {"train_data": [tokens], "valid_data": {"held-out": [tokens]}, "tokenizer": str(olmo_tokenizer_file)},
        "training": {"eval_interval": 3, "eval_iters": 2, "train_iters": 7},
        "evaluation": {
            "requests": requests,
            "tasks": TASKS,
            "limit": 6,
            "batch_tokens": 64,
            "perplexity": {"sets": {"own-set": [tokens]}, "limit_tokens": 192},
        },
    }


def train(values: dict[str, Any]) -> list[str]:
    """Train; the random states at the end, as text."""
    import random

    import numpy as np

    small_runs.train(values)
    return [str(state) for state in (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())]


def test_a_run_is_the_same_to_the_bit_with_and_without_evaluation(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, evaluated: dict[str, Any]
) -> None:
    parallel = {"data_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
    layout = {"parallel": parallel, "model": {"num_layers": 4}}
    plain = {"data": {"train_data": [tokens]}, "training": {"train_iters": 7}}
    without = run_on_ranks(2, train, small_run(tokens, tmp_path / "without", **plain, **layout))
    assert run_on_ranks(2, train, small_run(tokens, tmp_path / "with", **evaluated, **layout)) == without
    lines = read_metrics(tmp_path / "with")
    assert all(find_metric(name) for line in lines for name in line)
    expected = read_metrics(tmp_path / "without")
    assert [[line[name] for name in ("loss", "grad_norm")] for line in lines] == [
        [line[name] for name in ("loss", "grad_norm")] for line in expected
    ]
    for line in lines:
        assert set(line) - set(expected[line["step"] - 1]) == (NAMES if line["step"] in (3, 6, 7) else set())
    run_on_ranks(1, train, small_run(tokens, tmp_path / "alone", **evaluated, model={"num_layers": 4}))
    for line, alone in zip(lines, read_metrics(tmp_path / "alone"), strict=True):
        measured = {name: value for name, value in line.items() if name.startswith(("eval/", "validation"))}
        assert measured == pytest.approx({name: alone[name] for name in measured}, rel=SAME_SCORES)
    assert lines[-1]["evaluation_seconds"] > 0


def train_and_signal(values: dict[str, Any], batches: int) -> tuple[int, str]:
    """Train; rank 1 gets a signal in this batch of a perplexity set. The batches after it, and the run's last words."""
    import megatron_fanformer.train.evaluation  # noqa: F401  keeps what it imports: its batches do not count
    from megatron_fanformer.evaluate import rows

    taken, right = 0, rows.row_losses

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == batches and torch.distributed.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        return right(*arguments, **named)

    with mock.patch.object(rows, "row_losses", counted), pytest.raises(Interrupted) as stopped:
        small_runs.train(values)
    return taken - batches, str(stopped.value)


def test_a_signal_ends_an_evaluation_after_the_batch_and_the_step_is_saved(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, evaluated: Any
) -> None:
    run = tmp_path / "run"
    values = small_run(tokens, run, **evaluated, parallel={"data_parallel_size": 2})
    message = "stopped after step 3, saved; run the same command to continue"
    assert run_on_ranks(2, train_and_signal, values, 1) == [(0, message)] * 2
    last = read_metrics(run)[-1]
    assert last["step"] == 3
    assert {name for name in last if name in NAMES} == {"validation_loss/held-out", "evaluation_seconds"}
    assert run_folder.latest_checkpoint(run) == run / run_folder.CHECKPOINTS / "step-00000003"


# -- before anything is loaded


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as refused:
        find_start(config_from_dict(values), 1)
    return str(refused.value).splitlines()


def test_all_that_is_wrong_with_the_section_is_told_at_once(
    tmp_path: Path, tokens: str, evaluated: dict[str, Any]
) -> None:
    evaluated["evaluation"] |= {"tasks": ["hellaswagg", "gsm8k"], "limit": 0, "interval": 0}
    evaluated["evaluation"]["perplexity"]["limit_tokens"] = 0
    shown = problems(small_run(tokens, tmp_path / "run", **evaluated, optimizer={"lr": -1.0}))
    assert [line.partition(";")[0].partition(",")[0] for line in shown if "evaluation" in line] == [
        "evaluation.limit is 0",
        "evaluation.interval is 0",
        "evaluation.tasks: unknown task hellaswagg",
        "evaluation.perplexity.limit_tokens is 0",
    ]
    assert any("hellaswag?" in line for line in shown) and any("optimizer.lr" in line for line in shown)
    evaluated["evaluation"] |= {"tasks": ["gsm8k"], "limit": 1, "interval": 1, "perplexity": {}, "requests": None}
    *idle, written = problems(small_run(tokens, tmp_path / "run", **evaluated))[:3]
    assert [line.partition(";")[0] for line in idle] == [
        "evaluation.tasks is set without evaluation.requests",
        "evaluation.limit is set without evaluation.requests",
    ]
    assert "gsm8k, whose answers a model writes" in written


def test_graphs_of_one_shape_are_refused(tmp_path: Path, tokens: str, evaluated: dict[str, Any]) -> None:
    values = small_run(tokens, tmp_path / "run", **evaluated, kernels={"cuda_graph_impl": "local"})
    assert any("graphs take micro batches of one shape" in line for line in config_from_dict(values).problems(1))
