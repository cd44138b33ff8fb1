"""A profile of a run's steps: on the ranks that are to have one, of the same steps, and of no effect on the numbers."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_fanformer.checkpoint import store
from megatron_fanformer.inspection.trace import rank_times, read_events
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.training import profiling
from megatron_fanformer.training.config import config_from_dict
from megatron_fanformer.training.interrupts import Request
from megatron_fanformer.training.loggers.registry import LoggingConfig
from megatron_fanformer.training.machine_rules import memory_history_problems
from megatron_fanformer.training.traces import PHASE, trace_file, trace_folder
from tests.small_runs import RunOnRanks, small_run, trainer_of

DP2 = {"data_parallel_size": 2, "overlap_grad_reduce": True}


def train(values: dict[str, Any], signalled_step: int = 0) -> None:
    """Train to the end; on rank 1 a signal comes during a step."""
    with trainer_of(values) as trainer:
        attempt = trainer._attempt

        def attempted(batches: Any) -> Any:
            if trainer.step == signalled_step and trainer.grid.rank == 1:
                signal.raise_signal(signal.SIGURG)
            return attempt(batches)

        with mock.patch.object(trainer, "_attempt", attempted):
            trainer.train()


def losses(run: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (run / store.METRICS).read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


def weights(run: Path) -> dict[str, bytes]:
    checkpoint = store.latest_checkpoint(run)
    assert checkpoint is not None
    return {file.name: file.read_bytes() for file in checkpoint.glob("*.distcp")}


def traces(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run / store.TRACES)) for file in (run / store.TRACES).glob("*/*"))


def test_profiled_steps_compute_the_same_bits_and_their_times_add_up(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    logged = {"tensorboard": False, "profile_steps": [5, 7], "profile_ranks": None}
    run, plain = tmp_path / "run", tmp_path / "plain"
    run_on_ranks(2, train, small_run(tokens, run, parallel=DP2, logging=logged))
    run_on_ranks(2, train, small_run(tokens, plain, parallel=DP2))
    assert losses(run) == losses(plain)
    assert weights(run) == weights(plain) and weights(run)
    assert not (plain / store.TRACES).exists()
    folder = trace_folder(run, 5, 7)
    assert traces(run) == [f"{folder.name}/rank-{rank:05d}.json.gz" for rank in (0, 1)]
    for rank in (0, 1):
        events, found = read_events(trace_file(folder, rank)), rank_times(trace_file(folder, rank))
        steps = sorted((event for event in events if event.name.startswith("step ")), key=lambda event: event.ts)
        assert [event.name for event in steps] == ["step 5", "step 6", "step 7"] and found.steps == (5, 6, 7)
        assert 3e6 * found.step_seconds == pytest.approx(steps[-1].end - steps[0].ts)
        computed = {
            "matrix products",
            "attention",
            "FAN activation",
            "loss head",
            "norms",
            "SwiGLU",
            "rotary embedding",
        }
        assert {*computed, "communication", "optimizer", "loading samples", "host"} <= set(found.seconds)
        assert 0 < found.seconds["communication"] <= found.communication
        phases = {event.name for event in events if event.name.startswith(PHASE)}
        assert phases == {f"{PHASE}{part}" for part in ("forward", "gradient norm", "update", "loading samples")}
        updates = [event for event in events if event.name == f"{PHASE}update"]
        assert len(updates) == 3  # each ends with its step
        assert all(update.end <= step.end for update, step in zip(updates, steps, strict=True))


def test_a_save_between_profiled_steps_is_no_part_of_them(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    logged = {"tensorboard": False, "profile_steps": [5, 7]}
    run_on_ranks(1, train, small_run(tokens, tmp_path, logging=logged, checkpoint={"save_interval": 6}))
    file = trace_file(trace_folder(tmp_path, 5, 7), 0)
    spans = {event.name: event for event in read_events(file) if event.cat == "user_annotation"}
    assert spans["step 6"].end < spans[f"{PHASE}saving"].ts < spans[f"{PHASE}saving"].end <= spans["step 7"].ts
    between = spans["step 6"].ts - spans["step 5"].end + spans["step 7"].ts - spans["step 6"].end
    assert 3e6 * rank_times(file).seconds["between steps"] == pytest.approx(between)


def test_a_signal_to_one_rank_profiles_the_same_next_steps_on_all_and_once(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    values = small_run(tokens, tmp_path / "run", parallel=DP2, logging={"tensorboard": False, "profile_ranks": None})
    run_on_ranks(2, train, values, 4)
    assert traces(tmp_path / "run") == [f"step-00000005-00000007/rank-{rank:05d}.json.gz" for rank in (0, 1)]


def test_a_file_requests_a_profile_beside_the_configured_one_which_ends_with_the_run(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    (tmp_path / store.PROFILE_FILE).touch()
    logged = {"tensorboard": False, "profile_steps": [6, 8]}
    values = small_run(tokens, tmp_path, logging=logged)
    [[warnings, _]] = run_on_ranks(1, take_steps, values, 7)
    assert warnings == []
    # The first step saw the file.
    assert traces(tmp_path) == [f"step-0000000{steps}/rank-00000.json.gz" for steps in ("2-00000004", "6-00000007")]
    assert not (tmp_path / store.PROFILE_FILE).exists()


def take_steps(values: dict[str, Any], last: int) -> tuple[list[str], list[float]]:
    """Take steps and leave the run as one that was killed; the warnings, and the losses."""
    with mock.patch.object(profiling.logger, "warning") as warned, trainer_of(values) as trainer:
        while trainer.step < last:
            trainer.take_step()
    warnings = [call.args[0] % call.args[1:] for call in warned.call_args_list]
    return warnings, [loss for loss, _ in losses(Path(values["training"]["run_dir"]))]


def test_a_run_that_is_resumed_over_them_keeps_the_first_profile(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    logged = {"tensorboard": False, "profile_steps": [4, 5]}
    values = small_run(tokens, tmp_path, logging=logged, checkpoint={"save_interval": 3})
    assert run_on_ranks(1, take_steps, values, 5)[0][0] == []
    file = trace_file(trace_folder(tmp_path, 4, 5), 0)
    content = file.read_bytes()
    [[[kept], _]] = run_on_ranks(1, take_steps, values, 5)  # from the checkpoint of step 3
    assert kept == f"step 4  {file} is there and is kept; remove it to profile these steps again"
    assert file.read_bytes() == content


def without_space(values: dict[str, Any], library_is_silent: bool) -> tuple[list[str], list[float]]:
    """Take steps where the disk is full, of which torch's own export may say nothing."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def cut(_profile: Any, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X"')

    full = mock.patch.object(profiling, "_compress", refuse)
    with mock.patch.object(torch.profiler.profile, "export_chrome_trace", cut) if library_is_silent else full:
        return take_steps(values, 5)


@pytest.mark.parametrize("library_is_silent", [False, True])
def test_a_profile_that_cannot_be_written_ends_no_run(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, library_is_silent: bool
) -> None:
    values = small_run(tokens, tmp_path, logging={"tensorboard": False, "profile_steps": [3, 4]})
    [[[warning], taken]] = run_on_ranks(1, without_space, values, library_is_silent)
    assert warning.startswith("the profile of steps 3 to 4 cannot be written: ")
    assert ("torch has not written the end" if library_is_silent else "No space left") in warning
    assert len(taken) == 5
    assert traces(tmp_path) == []  # nothing half-written


def test_a_run_that_fails_does_not_wait_for_its_gpu(tmp_path: Path) -> None:
    """Its kernels may wait for other ranks, and torch's end of a profile waits for them."""
    config = LoggingConfig(tensorboard=False, profile_steps=[3, 4])
    grid = cast(RankGrid, SimpleNamespace(rank=0, world_size=2, device="cuda"))
    before = vars(torch.distributed.Work)["wait"]
    with mock.patch.object(torch.cuda, "synchronize"), mock.patch.object(torch.profiler, "profile") as profile:
        profiler = profiling.Profiler(config, grid, tmp_path, Request(None, "profile"))
        with pytest.raises(InterruptedError), profiler.recording(3):
            raise InterruptedError
        profiler.close(failed=True)
    assert profile.return_value.__enter__.called and not profile.return_value.__exit__.called
    assert vars(torch.distributed.Work)["wait"] == before


@pytest.mark.parametrize(
    ("logged", "problem"),
    [
        (
            {"profile_steps": [0, 3]},
            "logging.profile_steps is [0, 3]; it must be [FIRST, LAST] with 1 <= FIRST <= LAST",
        ),
        ({"profile_steps": [5, 4]}, "logging.profile_steps is [5, 4]; it must be"),
        ({"profile_steps": [5]}, "logging.profile_steps is [5]; it must be"),
        ({"profile_ranks": []}, "logging.profile_ranks is []; it must be ranks, from 0 on, or null"),
        ({"profile_steps": [19, 21]}, "logging.profile_steps is [19, 21], and the run ends with step 20; name steps"),
        ({"profile_ranks": [0, 2]}, "logging.profile_ranks has rank 2, and the run has ranks 0 to 1; name those"),
    ],
)
def test_what_a_run_never_profiles_is_refused(
    tokens: str, tmp_path: Path, logged: dict[str, Any], problem: str
) -> None:
    config = config_from_dict(small_run(tokens, tmp_path, parallel=DP2, logging=logged))
    [found] = config.problems(2)
    assert found.startswith(problem)


def test_the_history_of_memory_is_a_gpus(tokens: str, tmp_path: Path) -> None:
    logging = config_from_dict(small_run(tokens, tmp_path, logging={"record_memory_history": True})).logging
    [found] = memory_history_problems(logging, "cpu")
    assert found == "logging.record_memory_history is true, and only a GPU's memory has a history; set it to false"
    assert memory_history_problems(logging, "cuda") == []
