"""Runs on samples of each kind: within documents, and from .npy files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.train.config import TrainingConfig, config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.data.token_making import write_manifest
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, RunOnRanks, first_step, small_run, trainer_of
from tests.token_pairs import write_token_pair
from tests.train.test_trainer import train


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
        assert spread[before["step"] - 1][name] == pytest.approx(before[name], rel=SAME_LOSS)
    model = config_from_dict(small_run(prefix, tmp_path)).model
    for entry, flops in ((first, training_flops_per_token(model)), (other_first, training_flops_per_token(model, 1))):
        assert entry["model_flops_per_second"] / entry["tokens_per_second"] == pytest.approx(flops)


# -- .npy files: a sample of s tokens has s - 1 labels, and the loss is the mean over those

SAME_LOSS = 1e-6  # relative: float32 sums in another order

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {"data_parallel_size": 2}, "cp2": {"context_parallel_size": 2}}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    np.random.default_rng(0).integers(VOCAB_SIZE, size=900).astype("<u2").tofile(tmp_path / "a.npy")
    values = small_run(str(tmp_path / "*.npy"), tmp_path / "run")
    values["data"]["valid_data"] = {"same": [str(tmp_path)]}
    values["training"]["eval_iters"] = 1
    return values


def losses(values: dict[str, Any]) -> tuple[float, float, int]:
    """Of the first step and of an evaluation before it, and the tokens that the step's is over. On every rank."""
    from megatron_fanformer.train.evaluation import evaluate_loss

    with trainer_of(values) as trainer:
        valid = trainer._data.valid["same"]
        evaluated = evaluate_loss(trainer._wrapped, valid, trainer.grid, trainer.config, eval_iters=1)
        result = first_step(trainer)
        return result.loss, evaluated, result.tokens


def losses_by_hand(values: dict[str, Any], files: list[str]) -> tuple[float, float]:
    """The mean over the s - 1 labels of each of the first global batch's samples, cut from the raw file; one rank.

    With the vocabulary's padding, as in training, and without, as in evaluation.
    """
    (path,) = files
    raw = np.fromfile(path, "<u2")
    order = np.arange(len(raw) // SEQ_LENGTH, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(TrainingConfig.seed)).shuffle(order)
    rows = [raw[number * SEQ_LENGTH :][:SEQ_LENGTH] for number in order[: values["training"]["global_batch_size"]]]
    tokens_bs = torch.from_numpy(np.stack(rows).astype(np.int64))
    with trainer_of(values) as trainer:
        positions_bs = torch.arange(SEQ_LENGTH).expand_as(tokens_bs)
        with torch.no_grad():
            logits_bsv = trainer._stages[0](tokens_bs, positions_bs, None)[:, :-1]
        logits_nv, labels_n = logits_bsv.flatten(0, 1), tokens_bs[:, 1:].flatten()
        whole, unpadded = (
            torch.nn.functional.cross_entropy(of, labels_n) for of in (logits_nv, logits_nv[:, :VOCAB_SIZE])
        )
        return whole.item(), unpadded.item()


def test_the_loss_is_the_mean_over_one_label_less_than_tokens(
    values: dict[str, Any], tmp_path: Path, run_on_ranks: RunOnRanks
) -> None:
    ((whole, unpadded),) = run_on_ranks(1, losses_by_hand, values, [str(tmp_path / "a.npy")])
    ((trained, evaluated, tokens),) = run_on_ranks(1, losses, values)
    assert tokens == values["training"]["global_batch_size"] * (SEQ_LENGTH - 1)
    assert trained == pytest.approx(whole, rel=SAME_LOSS)
    assert evaluated == pytest.approx(unpadded, rel=SAME_LOSS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_does_not_change_the_loss(values: dict[str, Any], run_on_ranks: RunOnRanks, layout: str) -> None:
    """Though the masked position is on one of two ranks only where the sequence is cut."""
    (alone,) = run_on_ranks(1, losses, values)
    values["parallel"].update(LAYOUTS[layout])
    for found in run_on_ranks(2, losses, values):
        assert found == pytest.approx(alone, rel=SAME_LOSS)
