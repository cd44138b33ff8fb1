"""A run that stops after any step and goes on ends as if it had not stopped."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.stored_files import common_values, read_table
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import small_run, write_tokens
from tests.train.test_trainer import numbers, stored_tensors, train

STEPS = 12
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
    [(0, SOME), *(pytest.param(workers, ANY, marks=pytest.mark.full) for workers in (0, 2))],
    ids=["some", "any", "any, workers"],
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
