"""Training and evaluation on .npy files: a sample of s tokens has s - 1 labels, and the loss is the mean over those."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fanformer.data.token_files import NpyFile
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.train.config import TrainingConfig
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, first_step, small_run, trainer_of

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
    values: dict[str, Any], tmp_path: Path, run_on_ranks: Callable[..., list[Any]]
) -> None:
    ((whole, unpadded),) = run_on_ranks(1, losses_by_hand, values, [str(tmp_path / "a.npy")])
    ((trained, evaluated, tokens),) = run_on_ranks(1, losses, values)
    assert tokens == values["training"]["global_batch_size"] * (SEQ_LENGTH - 1)
    assert trained == pytest.approx(whole, rel=SAME_LOSS)
    assert evaluated == pytest.approx(unpadded, rel=SAME_LOSS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_does_not_change_the_loss(
    values: dict[str, Any], run_on_ranks: Callable[..., list[Any]], layout: str
) -> None:
    """Though the masked position is on one of two ranks only where the sequence is cut."""
    (alone,) = run_on_ranks(1, losses, values)
    values["parallel"].update(LAYOUTS[layout])
    for found in run_on_ranks(2, losses, values):
        assert found == pytest.approx(alone, rel=SAME_LOSS)


def reads_of_two_steps(values: dict[str, Any], file: str) -> tuple[int, str, bool]:
    """How often this rank reads a token file in a step and an evaluation, and the error of a step on damaged samples.

    With it whether another rank reports that error. On every rank.
    """
    from megatron_fanformer.train.evaluation import evaluate_loss

    with trainer_of(values) as trainer, mock.patch.object(NpyFile, "read", autospec=True, side_effect=NpyFile.read):
        first_step(trainer)
        valid = trainer._data.valid["same"]
        evaluate_loss(trainer._wrapped, valid, trainer.grid, trainer.config, eval_iters=1)
        reads = NpyFile.read.call_count  # type: ignore[attr-defined]
        dist.barrier()
        if trainer.grid.is_main:
            (np.fromfile(file, "<u2") + VOCAB_SIZE).tofile(file)
        dist.barrier()
        with pytest.raises(CorruptError) as caught:
            first_step(trainer)
        return reads, str(caught.value), caught.value.already_reported


@pytest.mark.parametrize("shared_by", ["tensor_model_parallel_size", "context_parallel_size"])
def test_one_rank_of_a_group_reads_and_all_raise_its_error(
    values: dict[str, Any], tmp_path: Path, run_on_ranks: Callable[..., list[Any]], shared_by: str
) -> None:
    values["parallel"][shared_by] = 2
    first, second = run_on_ranks(2, reads_of_two_steps, values, str(tmp_path / "a.npy"))
    assert (first[0], second[0]) == (2 * values["training"]["global_batch_size"], 0)
    assert "a.npy holds token id" in first[1] and first[1] == second[1]
    assert (first[2], second[2]) == (False, True)
