"""Whole runs of a small model: resumed after any step, in other layouts."""

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import StoredTensors
from megatron_fanformer.checkpoint.stored_files import common_values, read_table
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import SEQ_LENGTH, RunOnRanks, small_run, trainer_of, write_tokens
from tests.train.layouts import shards_of

STEPS, HALF = 12, 6  # of the runs that are resumed: beyond the five of the warm-up

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp2": {
        "parallel": {"data_parallel_size": 2},
        "model": {"qk_layernorm": True},
        "training": {"z_loss_coefficient": 1e-3},
    },
    "tp2-bf16": {"parallel": {"tensor_model_parallel_size": 2}, "precision": {"dtype": "bf16"}},
    "tp2-sp-dp2, FAN layers for the MLP": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2},
        "model": {"fan": {"placement": "ffn", "activation": "gelu"}},
    },
}
FULL = "tp2-sp-dp2, FAN layers for the MLP"


def world_size(values: dict[str, Any]) -> int:
    parallel = config_from_dict(values).parallel
    return parallel.model_parallel_size * (parallel.data_parallel_size or 1)


# -- on every rank


def train(values: dict[str, Any]) -> tuple[Any, Any]:
    """Run a configuration; this rank's pieces of the weights before and after."""
    with trainer_of(values) as trainer:
        before = shards_of(trainer._stages, trainer.grid)
        trainer.train()
        return before, shards_of(trainer._stages, trainer.grid)


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds as tensors, the optimizer's included."""
    stored = StoredTensors(checkpoint, read_table(checkpoint))
    return {name: stored.read(name) for name in stored.described}


# -- resuming


class Runs(NamedTuple):
    """The same run three times over: in one go, stopped half-way, and gone on with to the end."""

    values: dict[str, Any]
    straight: Path
    half: Path
    resumed: Path


@pytest.fixture(scope="module")
def runs_in(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory, tokens: str) -> Callable[[str], Runs]:
    """The runs of a layout, made when first asked for."""
    made: dict[str, Runs] = {}

    def runs(layout: str) -> Runs:
        if layout not in made:
            made[layout] = make_runs(run_on_ranks, tmp_path_factory.mktemp(layout), tokens, LAYOUTS[layout])
        return made[layout]

    return runs


def make_runs(
    run_on_ranks: RunOnRanks, folder: Path, tokens: str, layout: dict[str, dict[str, Any]], steps: int = STEPS
) -> Runs:
    layout = {**layout, "training": {"train_iters": steps, **layout.get("training", {})}}
    straight = small_run(tokens, folder / "straight", **layout)
    stopping = small_run(tokens, folder / "resumed", **layout)
    stopping["training"]["exit_interval"] = steps // 2
    ranks = world_size(straight)
    run_on_ranks(ranks, train, straight)
    run_on_ranks(ranks, train, stopping)
    shutil.copytree(folder / "resumed", folder / "half")
    run_on_ranks(ranks, train, stopping)
    return Runs(stopping, folder / "straight", folder / "half", folder / "resumed")


def test_a_resume_takes_the_present_learning_rate(
    run_on_ranks: RunOnRanks, runs_in: Callable[[str], Runs], tmp_path: Path
) -> None:
    runs = runs_in("dp2")
    values = copy.deepcopy(runs.values)
    shutil.copytree(runs.half, tmp_path / "run")
    values["training"]["run_dir"] = str(tmp_path / "run")
    values["optimizer"] = {"lr": 4e-3}
    values["schedule"] = {"lr_decay_style": "constant"}
    run_on_ranks(world_size(values), train, values)
    rates = {metrics["step"]: metrics["learning_rate"] for metrics in read_metrics(tmp_path / "run")}
    assert [rates[step] for step in range(HALF + 1, STEPS + 1)] == pytest.approx([4e-3] * HALF)
    assert rates[HALF] > 4e-3


def numbers(run: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "z_loss", "grad_norm", "learning_rate")
    return [tuple(metrics.get(name) for name in names) for metrics in read_metrics(run)]


@pytest.mark.parametrize("layout", ["dp2", "tp2-bf16", pytest.param(FULL, marks=pytest.mark.full)])
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    run_on_ranks: RunOnRanks, runs_in: Callable[[str], Runs], layout: str
) -> None:
    """In what it logs, its weights and its optimizer."""
    runs = runs_in(layout)
    assert [step for step, *_ in numbers(runs.half)] == list(range(1, HALF + 1))
    assert [step for step, *_ in numbers(runs.straight)] == list(range(1, STEPS + 1))
    assert numbers(runs.resumed) == numbers(runs.straight)
    step_tokens = runs.values["training"]["global_batch_size"] * SEQ_LENGTH  # whatever the layout, and before a resume
    for run in (runs.straight, runs.resumed):
        for metrics in read_metrics(run):
            assert metrics["tokens"] == metrics["step"] * step_tokens
            assert metrics["tokens_per_second"] * metrics["step_seconds"] == pytest.approx(step_tokens)

    [straight], [resumed] = (
        run_on_ranks(1, stored_tensors, run / "checkpoints" / run_folder.checkpoint_name(STEPS))
        for run in (runs.straight, runs.resumed)
    )
    assert straight.keys() == resumed.keys()
    assert any("exp_avg_sq" in name for name in straight)
    assert [name for name in straight if not torch.equal(straight[name], resumed[name])] == []


# -- a stop after any step


LAST = run_folder.checkpoint_name(STEPS)


def progress_of(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint holds besides tensors."""
    _, common = common_values(checkpoint, read_table(checkpoint))
    return common.get("progress", common)


def resumed_after(steps: Sequence[int], values: dict[str, Any], straight: Path, folder: Path) -> list[str]:
    """Go on from checkpoints of a run, to its end; what differs from the run itself, in words."""
    expected = stored_tensors(straight / run_folder.CHECKPOINTS / LAST)
    found = []
    for step in steps:
        run = folder / f"from-{step}"
        shutil.copytree(straight, run, ignore=lambda _folder, names: [name for name in names if name == LAST])
        if step == STEPS:  # nothing is left to do, and nothing may change
            shutil.copytree(straight / run_folder.CHECKPOINTS / LAST, run / run_folder.CHECKPOINTS / LAST)
        write_atomically(run / run_folder.CHECKPOINTS / run_folder.LATEST, run_folder.checkpoint_name(step) + "\n")
        train({**values, "training": {**values["training"], "run_dir": str(run)}})
        stored = stored_tensors(run / run_folder.CHECKPOINTS / LAST)
        if numbers(run) != numbers(straight):
            found.append(f"metrics after a stop at step {step}")
        if progress_of(run / run_folder.CHECKPOINTS / LAST) != progress_of(straight / run_folder.CHECKPOINTS / LAST):
            found.append(f"progress after a stop at step {step}")
        if stored.keys() != expected.keys():
            found.append(f"names of stored tensors after a stop at step {step}")
        found += [f"{name} after {step}" for name in stored if not torch.equal(stored[name], expected[name])]
        shutil.rmtree(run)
    return found


ANY = range(1, STEPS + 1)
SOME = (4, 8, 12)  # in the warm-up, after it, and the last: a save takes longer than a step


@pytest.mark.parametrize(
    ("workers", "steps"),
    [(0, SOME), pytest.param(2, ANY, marks=pytest.mark.full)],
    ids=["some", "any, workers"],
)
def test_a_stop_after_any_step_leaves_no_trace(
    run_on_ranks: Any, tmp_path: Path, workers: int, steps: Sequence[int]
) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    values = small_run(
        tokens,
        tmp_path / "straight",
        data={"num_workers": workers},
        training={"train_iters": STEPS},
        checkpoint={"save_interval": steps[0]},
        recovery={"iterations_to_skip": [2], "check_for_spiky_loss": True, "spike_window": 10},
    )
    run_on_ranks(1, train, values)
    steps_taken = [entry for entry in read_metrics(tmp_path / "straight") if "skipped" not in entry]
    assert len(steps_taken) == STEPS - 1
    progress = progress_of(tmp_path / "straight" / run_folder.CHECKPOINTS / LAST)
    assert progress["medians"]["losses"] == [entry["loss"] for entry in steps_taken[-10:]]
    assert (progress["step"], progress["skipped"]) == (STEPS, [2])
    resuming = {**values, "checkpoint": {}}
    assert run_on_ranks(1, resumed_after, steps, resuming, tmp_path / "straight", tmp_path) == [[]]


# -- kernels for a CPU, in bf16


ROUNDED = 2e-3  # relative: of losses near 4.6, over ten steps in which bf16 is rounded at other places


def train_by(cache: Path | None, values: dict[str, Any]) -> str | None:
    """Train, by the kernels where a cache is given; why there are none."""
    from megatron_fanformer.ops import cpu_kernels

    if cache is not None and (problem := cpu_kernels.load(cache)):
        return problem
    try:
        train(values)
    finally:
        cpu_kernels.unload("the test is over")
    return None


def test_runs_in_bf16(run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str) -> None:

    def run(name: str, steps: int, cache: Path | None) -> list[float]:
        values = small_run(
            tokens,
            tmp_path / name,
            precision={"dtype": "bf16"},
            training={"train_iters": steps},
            schedule={"lr_decay_iters": 10},
            checkpoint={"save_interval": 5},
        )
        if any(problems := run_on_ranks(1, train_by, cache, values)):
            pytest.skip(str(problems[0]))
        return [entry["loss"] for entry in read_metrics(tmp_path / name)]

    plain, whole = run("plain", 10, None), run("whole", 10, tmp_path / "cache")
    run("resumed", 5, tmp_path / "cache")
    assert whole == pytest.approx(plain, rel=ROUNDED, abs=0)
    assert whole != plain
    assert run("resumed", 10, tmp_path / "cache") == whole
