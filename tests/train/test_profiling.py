"""A profile of a run's steps: on the ranks that are to have one, of the same steps, and of no effect on the numbers."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train import profiling
from megatron_fanformer.train.loggers import LoggingConfig
from tests.small_runs import RunOnRanks, small_run, train

DP2 = {"data_parallel_size": 2, "overlap_grad_reduce": True}


def losses(run: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (run / run_folder.METRICS).read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


def weights(run: Path) -> dict[str, bytes]:
    checkpoint = run_folder.latest_checkpoint(run)
    assert checkpoint is not None
    return {file.name: file.read_bytes() for file in checkpoint.glob("*.distcp")}


def traces(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run / run_folder.TRACES)) for file in (run / run_folder.TRACES).glob("*/*"))


def names(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event["ph"] == "X"}


def test_profiled_steps_compute_the_same_bits_and_are_in_a_trace_and_a_table(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    logged = {"tensorboard": False, "profile_steps": [5, 7], "profile_ranks": None}
    run, plain = tmp_path / "run", tmp_path / "plain"
    run_on_ranks(2, train, small_run(tokens, run, parallel=DP2, logging=logged))
    run_on_ranks(2, train, small_run(tokens, plain, parallel=DP2))
    assert losses(run) == losses(plain)
    assert weights(run) == weights(plain) and weights(run)
    assert not (plain / run_folder.TRACES).exists()
    files = [f"rank-{rank:05d}{suffix}" for rank in (0, 1) for suffix in (".json.gz", ".txt")]
    assert traces(run) == [f"step-00000005-00000007/{file}" for file in files]
    for rank in (0, 1):
        folder = run / run_folder.TRACES / "step-00000005-00000007"
        found = names(folder / f"rank-{rank:05d}.json.gz")
        assert {name for name in found if name.startswith("step ")} == {"step 5", "step 6", "step 7"}
        assert "aten::mm" in found
        rows = [line.split() for line in (folder / f"rank-{rank:05d}.txt").read_text().splitlines()]
        assert [row[-1] for row in rows if row[:2] == ["step", "6"]] == ["1"]  # calls


def test_a_run_that_fails_does_not_wait_for_its_gpu(tmp_path: Path) -> None:
    """Its kernels may wait for other ranks, and torch's end of a profile waits for them."""
    config = LoggingConfig(tensorboard=False, profile_steps=[3, 4])
    grid = cast(RankGrid, SimpleNamespace(rank=0, world_size=2, device="cuda"))
    with mock.patch.object(profiling, "profile") as profile:
        profiler = profiling.Profiler(config, grid, tmp_path)
        with pytest.raises(InterruptedError), profiler.recording(3):
            raise InterruptedError
        profiler.close(2, failed=True)
    assert profile.return_value.start.called and not profile.return_value.stop.called


def test_steps_that_are_no_span_are_refused() -> None:
    for steps in ([5, 4], [5]):
        (problem,) = LoggingConfig(profile_steps=steps).problems()
        assert problem.startswith(f"logging.profile_steps is {steps}; it must be [FIRST, LAST]")
