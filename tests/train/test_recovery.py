"""What a run does by itself: about damaged checkpoints, and about steps whose numbers are bad."""

import itertools
import json
import shutil
from collections.abc import Callable, Collection
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import CorruptError, DivergenceError
from megatron_fanformer.runtime.agreement import is_main
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from megatron_fanformer.train.preflight import find_start
from megatron_fanformer.train.recovery import BadSteps, RecoveryConfig, read_events
from megatron_fanformer.train.step import StepBatches
from tests.small_runs import RunOnRanks, small_run, trainer_of
from tests.train.test_trainer import stored_tensors, train

Configured = Callable[..., dict[str, Any]]
Without = Callable[..., Path]
STEPS = 12
LAST = run_folder.checkpoint_name(STEPS)
LAYOUT = {"data_parallel_size": 2}
SLOW_SECONDS = 0.5  # of writing a checkpoint, in which a run takes several steps


class Poison(NamedTuple):
    """Gradients of one rank that are not finite."""

    steps: Collection[int]
    attempts: int = 1000
    """How often each of the steps is spoiled before it is computed as it should be."""
    ranks: tuple[int, ...] = (1,)
    """Those that spoil the steps, in turn."""


def train_poisoned(values: dict[str, Any], poison: Poison) -> str | None:
    """Run a configuration with poison in it; what ended it, if anything did."""
    with trainer_of(values) as trainer:
        ranks = dict(zip(poison.steps, itertools.cycle(poison.ranks)))
        left = {step: poison.attempts for step in poison.steps if ranks[step] == trainer.grid.rank}

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if left.get(trainer.step, 0) <= 0:
                return gradient
            left[trainer.step] -= 1
            return gradient * float("nan")

        spoiling = trainer._stages[0].decoder.layers[0].pre_mlp_layernorm.weight.register_hook(spoil)
        try:
            trainer.train()
        except (DivergenceError, CorruptError) as error:
            return str(error)
        finally:
            spoiling.remove()
    return None


@pytest.fixture(scope="module")
def configured(tokens: str) -> Configured:
    """`configured(run, **recovery)`: a run that saves after every fifth step."""

    def configuration(run: Path, **recovery: Any) -> dict[str, Any]:
        training, checkpoint = {"train_iters": STEPS}, {"save_interval": 5}
        return small_run(tokens, run, parallel=LAYOUT, training=training, checkpoint=checkpoint, recovery=recovery)

    return configuration


@pytest.fixture(scope="module")
def without(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory, configured: Configured) -> Without:
    """`without(3, 4)`: a run that was told to skip these steps; made when first asked for."""
    made: dict[tuple[int, ...], Path] = {}

    def run(*steps: int) -> Path:
        if steps not in made:
            made[steps] = tmp_path_factory.mktemp("without") / "run"
            run_on_ranks(2, train, configured(made[steps], iterations_to_skip=list(steps)))
        return made[steps]

    return run


def taken(run: Path) -> list[tuple[Any, ...]]:
    """Step and numbers of the steps that were taken."""
    return [(m["step"], m["loss"], m["grad_norm"]) for m in read_metrics(run) if "skipped" not in m]


def assert_same_end(run_on_ranks: RunOnRanks, run: Path, expected: Path) -> None:
    """The same steps with the same numbers, and the same checkpoint in the end, bit for bit."""
    assert taken(run) == taken(expected)
    [ours], [theirs] = (
        run_on_ranks(1, stored_tensors, folder / run_folder.CHECKPOINTS / LAST) for folder in (run, expected)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


# -- bad numbers


def test_poisoned_steps_are_skipped_as_if_they_had_been_named(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, without: Without
) -> None:
    values = configured(tmp_path / "run")
    assert run_on_ranks(2, train_poisoned, values, Poison((3, 7, 10))) == [None, None]
    assert_same_end(run_on_ranks, tmp_path / "run", without(3, 7, 10))
    saved = [run_folder.step_of(path) for path in run_folder.complete_checkpoints(tmp_path / "run")]
    assert saved == [5, STEPS]  # and none after a bad step
    skipped = [m for m in read_metrics(tmp_path / "run") if "skipped" in m]
    assert [m["step"] for m in skipped] == [3, 7, 10]
    assert {m["skipped"] for m in skipped} == {"the gradient norm is nan"}
    assert read_metrics(tmp_path / "run")[-1]["recovery/skipped_steps"] == 3
    assert len(events(tmp_path / "run", "computed_again")) == 3


def test_a_fault_of_a_machine_leaves_no_trace_but_an_event(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, without: Without
) -> None:
    values = configured(tmp_path / "run")
    assert run_on_ranks(2, train_poisoned, values, Poison((4, 11), attempts=1, ranks=(1, 0))) == [None, None]
    assert_same_end(run_on_ranks, tmp_path / "run", without())
    again = events(tmp_path / "run", "computed_again")
    assert [(event["step"], event["first"], event["second"]) for event in again] == [
        (4, "the gradient norm is nan", None),
        (11, "the gradient norm is nan", None),
    ]
    assert events(tmp_path / "run", "skipped") == []


def fault_by_norms(values: dict[str, Any], own: tuple[float, float]) -> tuple[float, str | None]:
    """The norm and the fault of a step whose gradients' norm each rank has by itself."""
    with trainer_of(values) as trainer:
        trainer._optimizer.get_grad_norm = lambda: own[trainer.grid.rank]
        result, fault = trainer._attempt(StepBatches(trainer._batches, trainer._num_micro_batches))
    return result.grad_norm, fault


PLAIN = {"use_distributed_optimizer": False}
INF = (inf, "the gradient norm is inf")


@pytest.mark.parametrize(
    ("parallel", "own", "judged"),
    [
        ({**LAYOUT, **PLAIN}, (3.0, nan), [INF, INF]),
        ({**LAYOUT, **PLAIN}, (-inf, 3.0), [INF, INF]),
        ({"context_parallel_size": 2, **PLAIN}, (1 / 3, 0.1), [(1 / 3, None)] * 2),
        ({**LAYOUT, "num_distributed_optimizer_instances": 2}, (nan, 3.0), [INF, INF]),
    ],
)
def test_replicas_that_each_take_the_norm_judge_alike(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, parallel: Any, own: Any, judged: list[Any]
) -> None:
    """One that decides by itself to compute a step again waits for the others for ever."""
    values = small_run(tokens, tmp_path / "run", parallel=parallel)
    assert run_on_ranks(2, fault_by_norms, values, own) == judged


def test_several_bad_steps_in_a_row_send_the_run_back(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, without: Without
) -> None:
    values = configured(tmp_path / "run")
    assert run_on_ranks(2, train_poisoned, values, Poison((7, 8, 9))) == [None, None]
    assert_same_end(run_on_ranks, tmp_path / "run", without(7, 8, 9))
    (back,) = events(tmp_path / "run", "rewound")
    assert (back["step"], list(back["skipped"])) == (5, ["7", "8", "9"])
    assert read_metrics(tmp_path / "run")[-1]["recovery/rewinds"] == 1


def test_a_run_may_go_back_once_more_after_a_save(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, without: Without
) -> None:
    values = configured(tmp_path / "run", max_bad_steps_in_a_row=1, max_rewinds=1)
    assert run_on_ranks(2, train_poisoned, values, Poison((7, 11))) == [None, None]
    assert [event["step"] for event in events(tmp_path / "run", "rewound")] == [5, 10]
    assert_same_end(run_on_ranks, tmp_path / "run", without(7, 11))


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured
) -> None:
    values = configured(tmp_path / "run")
    for problem in run_on_ranks(2, train_poisoned, values, Poison((2, 3, 4))):
        assert problem is not None
        assert problem.startswith("steps 2 to 4: the gradient norm is nan, and there is no checkpoint to go back to; ")


def test_spikes_are_judged_by_the_medians_of_good_steps() -> None:
    steps = BadSteps(RecoveryConfig(check_for_spiky_loss=True, spike_window=50), [])
    for loss in (2.0, 19.0, 2.0, 2.0):  # of which the mean is another
        steps.note_good(1, loss, 1.0)
    assert steps.fault_in(100.0, 1.0) is None  # too early to tell
    steps.note_good(1, 2.0, 1.0)
    assert steps.fault_in(4.0, 10.0) is None
    assert steps.fault_in(4.1, 1.0) == "the loss is 4.1, more than 2 times its median of 2"
    assert steps.fault_in(2.0, 10.1) == "the gradient norm is 10.1, more than 10 times its median of 1"
    assert steps.fault_in(float("inf"), 1.0) == "the loss is inf"
    unconcerned = BadSteps(RecoveryConfig(check_for_nan_in_loss_and_grad=False), [])
    assert unconcerned.fault_in(float("nan"), float("nan")) is None


# -- what is saved


def train_with_a_bad_tensor(values: dict[str, Any], which: str) -> str:
    """A tensor of one rank has a value that is not finite when a run's last step is saved; the error."""
    with trainer_of(values) as trainer:

        def spoil() -> dict[str, float]:
            if trainer.grid.rank == 1 and trainer._is_over:
                optimizer = trainer._optimizer.chained_optimizers[0].optimizer
                states = [state for state in optimizer.state.values() if state["exp_avg"].numel()]
                tensor = (
                    trainer._stages[0].decoder.final_layernorm.weight if which == "weight" else states[0]["exp_avg"]
                )
                tensor.data.view(-1)[0] = float("inf")
            return {}

        trainer._evaluate_if_due = spoil  # type: ignore[method-assign]
        with pytest.raises(DivergenceError) as caught:
            trainer.train()
        return str(caught.value)


@pytest.mark.parametrize("which", ["weight", "moment"])
def test_what_is_not_finite_is_never_published(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, which: str
) -> None:
    values = configured(tmp_path / "run")
    values["parallel"]["use_distributed_optimizer"] = which == "moment"
    values["training"]["train_iters"] = 6
    first, second = run_on_ranks(2, train_with_a_bad_tensor, values, which)
    assert first == second
    name = {"weight": "decoder.final_layernorm.weight", "moment": "optimizer.state.exp_avg."}[which]
    assert first.startswith(f"step 6 was not saved: {name}")
    assert " has the value inf on rank 1; " in first
    names = sorted(path.name for path in (tmp_path / "run" / run_folder.CHECKPOINTS).iterdir())
    assert names == ["latest", "step-00000005"]


def test_a_validation_loss_that_is_not_finite_ends_the_run(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, tokens: str
) -> None:
    values = configured(tmp_path / "run", check_for_nan_in_loss_and_grad=False)
    values["data"]["valid_data"] = {"held out": [tokens]}
    values["training"]["eval_interval"] = 3
    for problem in run_on_ranks(2, train_poisoned, values, Poison((2,))):
        assert problem is not None
        assert problem.startswith("step 3: the validation loss (held out) is nan; ")
    assert [entry["step"] for entry in read_metrics(tmp_path / "run") if "grad_norm" in entry] == [1, 2, 3]
    assert not (tmp_path / "run" / run_folder.CHECKPOINTS).exists()


# -- damaged checkpoints


def flip_a_bit(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["__1_0.distcp", "manifest.json"])
def test_a_run_goes_on_from_before_a_damaged_checkpoint(
    run_on_ranks: RunOnRanks, tmp_path: Path, configured: Configured, without: Without, file: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(without(), run)
    shutil.rmtree(run / run_folder.CHECKPOINTS / LAST)
    (run / run_folder.CHECKPOINTS / run_folder.LATEST).write_text("step-00000010\n")
    flip_a_bit(run / run_folder.CHECKPOINTS / "step-00000010" / file, 0.5)
    strict = configured(run, use_earlier_checkpoint=False)
    if file == "__1_0.distcp":  # found when it is loaded
        problem = run_on_ranks(2, train_error, strict)[0]
    else:
        with pytest.raises(CorruptError) as caught:
            find_start(config_from_dict(strict), 2)
        problem = str(caught.value)
    assert str(run / run_folder.CHECKPOINTS / "step-00000010" / file) in problem
    run_on_ranks(2, train, configured(run))
    assert_same_end(run_on_ranks, run, without())
    (event,) = events(run, "earlier_checkpoint")
    assert (event["step"], event["damaged"]) == (5, "step-00000010")
    assert file in event["reason"]
    assert (run / run_folder.CHECKPOINTS / "damaged-step-00000010").is_dir()


def train_error(values: dict[str, Any]) -> str:
    with pytest.raises(CorruptError) as caught:
        train(values)
    assert caught.value.already_reported is not is_main()
    return str(caught.value)


def test_where_every_checkpoint_is_damaged_nothing_starts_anew(
    tmp_path: Path, configured: Configured, without: Without
) -> None:
    shutil.copytree(without(), tmp_path / "run")
    for checkpoint in run_folder.complete_checkpoints(tmp_path / "run"):
        flip_a_bit(checkpoint / "config.yaml", 0.3)
    with pytest.raises(CorruptError, match=f"{LAST}/config.yaml is damaged"):
        find_start(config_from_dict(configured(tmp_path / "run")), 2)


def test_events_are_those_since_the_run_began(tmp_path: Path) -> None:
    names = ("skipped", "began", "skipped", "other")
    lines = (json.dumps({"event": name, "step": step}) for step, name in enumerate(names, 1))
    (tmp_path / "recovery.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert [event["step"] for event in read_events(tmp_path)] == [3]


def test_what_a_run_went_back_for_is_skipped_by_the_next_start_too() -> None:
    past = [{"event": "skipped", "step": 3}, {"event": "rewound", "step": 2, "skipped": {"7": "the loss is nan"}}]
    steps = BadSteps(RecoveryConfig(iterations_to_skip=[5]), past)
    assert [step for step in range(10) if steps.reason_to_skip(step)] == [5, 7]
    assert steps.reason_to_skip(7) == "the loss is nan"


def test_medians_are_those_of_the_checkpoint_that_a_run_goes_back_to() -> None:
    steps = BadSteps(RecoveryConfig(check_for_spiky_loss=True, spike_window=10), [])
    for step, loss in enumerate((1.0, 2.0, 3.0)):
        steps.note_good(step, loss, 10 * loss)
    saved = steps.medians()
    assert saved == {"losses": [1.0, 2.0, 3.0], "grad_norms": [10.0, 20.0, 30.0]}
    steps.note_good(3, 9.0, 90.0)
    steps.set_medians(saved)
    assert steps.medians() == saved
    assert steps.fault_in(2.0, 20.0 * RecoveryConfig().spiky_grad_norm_factor + 1) is not None
    assert steps.fault_in(2.0 * RecoveryConfig().spiky_loss_factor, 20.0) is None


def test_a_new_checkpoint_behind_a_good_step_lets_a_run_go_back_again() -> None:
    steps = BadSteps(RecoveryConfig(max_bad_steps_in_a_row=1, max_rewinds=1), [])
    for bad in (4, 8):
        steps.note_bad(bad, "the loss is inf")
        assert (steps.limit_reached, steps.rewind_refusal) == (True, None)
        assert steps.note_rewind() == {bad: "the loss is inf"}
        assert (steps.limit_reached, steps.rewind_refusal) == (False, "recovery.max_rewinds is reached")
        for good in (bad - 1, bad + 1):  # the first once more
            assert steps.rewind_refusal
            steps.note_good(good, 1.0, 1.0)
            assert steps.rewind_refusal
            steps.note_saved()
