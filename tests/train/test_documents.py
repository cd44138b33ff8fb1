"""Whole runs in which attention stays within documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.data.token_making import write_manifest
from tests.small_runs import VOCAB_SIZE, small_run
from tests.token_pairs import write_token_pair
from tests.train.test_trainer import train

RunOnRanks = Callable[..., list[Any]]
SAME = 1e-6  # float32 sums in another order


def test_training_and_evaluation_are_within_documents(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    """From token files whose manifest says what ends a document, through loader processes."""
    generator = np.random.default_rng(0)
    documents = [np.append(generator.integers(1, VOCAB_SIZE, size=2 + number % 9), 0) for number in range(200)]
    prefix = write_token_pair(tmp_path / "tokens", [[document] for document in documents])
    write_manifest(prefix, dtype="uint16", max_token_id=VOCAB_SIZE - 1)

    def metrics_of(name: str, parallel: dict[str, Any] | None = None, **data: Any) -> list[dict[str, Any]]:
        values = small_run(
            prefix,
            tmp_path / name,
            data={"train_data": [prefix], "valid_data": {"v": [prefix]}, "num_workers": 1, **data},
            schedule={"lr_warmup_iters": 1},
            training={"train_iters": 2, "eval_interval": 2, "eval_iters": 1},
            parallel=parallel or {},
        )
        run_on_ranks((parallel or {}).get("context_parallel_size", 1), train, values)
        return read_metrics(tmp_path / name)

    (first, last), (other_first, other_last) = metrics_of("across"), metrics_of("within", reset_attention_mask=True)
    assert first["tokens"] == other_first["tokens"]
    assert first["loss"] == pytest.approx(other_first["loss"], rel=0.05)  # the same tokens, and weights
    assert first["loss"] != other_first["loss"]
    assert last["validation_loss/v"] != other_last["validation_loss/v"]
    by_heads = {"context_parallel_size": 2, "cp_comm_type": "a2a"}
    spread = metrics_of("spread", by_heads, reset_attention_mask=True)
    for name, before in (("loss", other_first), ("loss", other_last), ("validation_loss/v", other_last)):
        assert spread[before["step"] - 1][name] == pytest.approx(before[name], rel=SAME)
    model = config_from_dict(small_run(prefix, tmp_path)).model
    for entry, flops in ((first, training_flops_per_token(model)), (other_first, training_flops_per_token(model, 1))):
        assert entry["model_flops_per_second"] / entry["tokens_per_second"] == pytest.approx(flops)


def test_a_layout_that_cannot_is_refused(tmp_path: Path) -> None:
    data = {"train_data": ["tokens"], "reset_attention_mask": True}
    values = small_run("tokens", tmp_path, data=data, parallel={"context_parallel_size": 2})
    (problem,) = config_from_dict(values).problems_of_layout()
    assert problem.startswith("data.reset_attention_mask with parallel.context_parallel_size 2 and cp_comm_type null")
