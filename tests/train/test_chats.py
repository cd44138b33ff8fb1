"""Fine-tuning on packed chats: the loss per learned token, epochs, resuming, and what a checkpoint gets."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from megatron_fanformer.train.preflight import find_start, with_steps
from tests.chat_pairs import Chat, random_chats, write_chats
from tests.checkpoint.test_saving import writers_do_first
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, RunOnRanks, first_step, small_run, trainer_of
from tests.train.test_recovery import SLOW_SECONDS
from tests.train.test_trainer import train

SAME = 1e-6  # relative: float32 sums in another order


def chats_run(folder: Path, chats: list[Chat], **sections: dict[str, Any]) -> dict[str, Any]:
    prefix = write_chats(folder / "chats", chats)
    data = {"format": "sft", "train_data": [prefix], **sections.pop("data", {})}
    return small_run(prefix, folder / "run", data=data, **sections)


def without_loss(ids: Sequence[int]) -> Chat:
    """A conversation that has no loss: its one learned token is the first, which nothing comes before."""
    return list(ids), [place == 0 for place in range(len(ids))]


# -- one step, on every rank


def step(values: dict[str, Any]) -> tuple[float, float, int]:
    """Loss, gradient norm and learned tokens of the first step."""
    with trainer_of(values) as trainer:
        result = first_step(trainer)
        return result.loss, result.grad_norm, result.tokens


def step_by_hand(values: dict[str, Any]) -> tuple[float, float, int, list[int]]:
    """The same from each conversation by itself, and the learned tokens of each sample; one rank."""
    with trainer_of({**values, "kernels": {"gradient_accumulation_fusion": False}}) as trainer:  # autograd gives them
        (model,), dataset = trainer._stages, trainer._data.train
        losses, counts = [], []
        for sample in range(trainer.config.training.global_batch_size):
            counts.append(0)
            for number in dataset.members(sample):
                files, own = dataset.conversations.locate(number)
                ids, learned = map(torch.from_numpy, files[own])
                logits_tv = model(ids[None, :-1], torch.arange(len(ids) - 1)[None], None)[0]
                losses.append(
                    torch.nn.functional.cross_entropy(logits_tv, ids[1:], reduction="none")[learned[1:]].sum()
                )
                counts[-1] += int(learned[1:].sum())
        loss = torch.stack(losses).sum() / sum(counts)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return loss.item(), math.sqrt(sum(float(each.square().sum()) for each in gradients)), sum(counts), counts


def test_the_loss_is_the_mean_over_learned_tokens_in_every_layout(tmp_path: Path, run_on_ranks: RunOnRanks) -> None:
    """Of micro batches with different numbers of them, and of one without any."""
    silent = without_loss(range(SEQ_LENGTH))
    values = chats_run(
        tmp_path,
        [*random_chats(5, vocab_size=VOCAB_SIZE), silent],
        training={"global_batch_size": 4, "micro_batch_size": 1, "seed": 3},
    )
    ((loss, norm, tokens, counts),) = run_on_ranks(1, step_by_hand, values)
    assert 0 in counts and len(set(counts)) > 2
    for layout in ({}, {"data_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        for found in run_on_ranks(2 if layout else 1, step, {**values, "parallel": layout}):
            assert found == pytest.approx((loss, norm, tokens), rel=SAME)


def learned_by_step(values: dict[str, Any]) -> list[int]:
    with trainer_of(values) as trainer:
        size, dataset = trainer.config.training.global_batch_size, trainer._data.train
        masks = [dataset[sample]["loss_mask"] for sample in range(size * trainer.config.training.steps)]
        return [int(torch.stack(masks[first : first + size]).sum()) for first in range(0, len(masks), size)]


def test_a_step_without_a_learned_token_has_no_loss_and_changes_nothing(
    tmp_path: Path, run_on_ranks: RunOnRanks
) -> None:
    """Neither weights nor medians: the steps after it are what they are where it is left out."""
    whole = random_chats(40, vocab_size=VOCAB_SIZE, shortest=SEQ_LENGTH, longest=SEQ_LENGTH)
    values = chats_run(
        tmp_path,
        [chat if number % 5 == 0 else without_loss(chat[0]) for number, chat in enumerate(whole)],
        parallel={"data_parallel_size": 2},
        schedule={"lr_warmup_iters": 0},
        training={"train_iters": 20, "global_batch_size": 2, "micro_batch_size": 1},
        recovery={"check_for_spiky_loss": True, "spike_window": 10},
    )
    counts = run_on_ranks(2, learned_by_step, values)[0]
    silent = [step for step, count in enumerate(counts, 1) if not count]
    assert len(silent) > 10 and counts[0] == 0  # of which the median would be 0
    left_out = {"run_dir": str(tmp_path / "left-out")}
    named = {**values, "training": values["training"] | left_out, "recovery": {"iterations_to_skip": silent}}
    of_silent, of_left_out = (run_on_ranks(2, train, each)[0][1] for each in (values, named))
    assert all(torch.equal(old[-1], new[-1]) for old, new in zip(of_silent, of_left_out, strict=True))
    metrics, expected = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "left-out")
    assert [entry["step"] for entry in metrics if "skipped" in entry] == silent
    assert [entry.get("loss") for entry in metrics] == [entry.get("loss") for entry in expected]


def test_a_validation_set_without_a_learned_token_is_refused(tmp_path: Path, run_on_ranks: RunOnRanks) -> None:
    """At the start where no conversation has one, else where the samples that are read have none."""
    whole = random_chats(40, vocab_size=VOCAB_SIZE, shortest=SEQ_LENGTH, longest=SEQ_LENGTH)
    silent = [without_loss(chat[0]) for chat in whole]
    (tmp_path / "other").mkdir()
    values = chats_run(
        tmp_path,
        whole,
        data={"valid_data": {"held-out": [write_chats(tmp_path / "other" / "chats", silent)]}},
        training=dict(train_iters=6, global_batch_size=2, micro_batch_size=1, eval_iters=2, eval_interval=3),
        checkpoint={"save_interval": 2, "async_save": True},
    )
    with pytest.raises(InputError, match=r"^validation set held-out has no learned token within the first 16 of any"):
        find_start(config_from_dict(values), 1)
    write_chats(tmp_path / "other" / "chats", [*silent[1:], whole[0]])
    message = "validation set held-out has no learned token in the 4 samples that training.eval_iters 2 reads; raise"
    assert run_on_ranks(2, refusal, {**values, "parallel": {"data_parallel_size": 2}}) == [message] * 2
    assert [path.name for path in run_folder.complete_checkpoints(tmp_path / "run")] == ["step-00000002"]


def refusal(values: dict[str, Any]) -> str | None:
    try:
        with writers_do_first(partial(time.sleep, SLOW_SECONDS)):
            train(values)
    except InputError as error:
        return str(error).partition(" it,")[0]
    return None


# -- runs


def test_epochs_make_whole_steps(tmp_path: Path) -> None:
    """Rounded up: every conversation is seen as often as it is asked for."""
    whole = random_chats(9, vocab_size=VOCAB_SIZE, shortest=SEQ_LENGTH, longest=SEQ_LENGTH)  # a sample each
    training = {"train_iters": None, "epochs": 1, "global_batch_size": 4}
    assert with_steps(config_from_dict(chats_run(tmp_path, whole, training=training))).training.train_iters == 3


def test_epochs_become_steps_which_the_run_records(tmp_path: Path, run_on_ranks: RunOnRanks) -> None:
    values = chats_run(
        tmp_path,
        random_chats(25, vocab_size=VOCAB_SIZE),
        data={"split": "8,2"},
        training={"train_iters": None, "epochs": 1.5},
        schedule={"lr_warmup_iters": 0, "lr_warmup_fraction": 0.5, "lr_decay_style": "constant"},
    )
    start = find_start(config_from_dict(values), None)
    run_on_ranks(1, train, values)
    (checkpoint,) = run_folder.complete_checkpoints(tmp_path / "run")
    saved = run_folder.saved_config(checkpoint)
    metrics = read_metrics(tmp_path / "run")
    assert (saved["training"]["train_iters"], saved["training"]["epochs"]) == (start.train_iters, None)
    assert len(metrics) == start.train_iters and "validation_loss/validation" in metrics[-1]
    samples = saved["training"]["train_iters"] * values["training"]["global_batch_size"]
    packed = math.ceil(sum(len(ids) for ids, _ in random_chats(25, vocab_size=VOCAB_SIZE)[:20]) / SEQ_LENGTH)
    assert 1.5 * packed <= samples < 1.5 * 2 * packed + values["training"]["global_batch_size"]
    warmup = round(0.5 * start.train_iters)
    rates = [entry["learning_rate"] for entry in metrics]
    assert rates == pytest.approx([1e-2 * min(1, step / warmup) for step in range(1, len(rates) + 1)])
    assert find_start(config_from_dict(values), None, unless_complete=True) is None  # it is complete
    values["training"]["epochs"] = 0.5
    with pytest.raises(InputError, match=rf"epochs makes \d+, but .* is at step {start.train_iters}; raise it"):
        find_start(config_from_dict(values), None)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"epochs": 2}}, "training.train_iters, training.epochs: both are given"),
        ({"training": {"train_iters": None}}, "training.train_iters, training.epochs: neither is given"),
        (
            {"training": {"train_iters": None, "epochs": 1}, "data": {"format": "pretraining"}},
            "training.epochs is 1.0, which is only for conversations (data.format sft)",
        ),
        ({"schedule": {"lr_warmup_fraction": 0.1}}, "schedule.lr_warmup_fraction is 0.1 and lr_warmup_iters 5"),
        (
            {"schedule": {"lr_warmup_fraction": 0.99, "lr_warmup_iters": 0}},
            "schedule.lr_warmup_fraction 0.99 is not below the end of the decay, step 20",
        ),
        ({"data": {"reset_attention_mask": False}}, "data.reset_attention_mask: false"),
    ],
)
def test_bad_input_is_refused_before_a_run(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    values = chats_run(tmp_path, random_chats(20, vocab_size=VOCAB_SIZE), **sections)
    with pytest.raises(InputError) as refused:
        find_start(config_from_dict(values), None)
    assert message in str(refused.value)
