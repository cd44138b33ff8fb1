"""Runs on two local ranks that are launched: stopped by a signal and gone on with, and ended by one rank's failure.

Killed and stopped ones are in tests/faults.
"""

import contextlib
import logging
import logging.handlers
import os
import queue
import signal
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fanformer.errors import DivergenceError, FanformerError, Interrupted
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime import launch, parallel
from megatron_fanformer.runtime.agreement import loopback_store, store_of_ranks
from megatron_fanformer.runtime.device import ERROR_FILE
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import METRICS, read_metrics
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import small_run, start_command, write_config, write_tokens

TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens")


def train_here(values: dict[str, Any]) -> list[str]:
    """Train on this rank; what it logs."""
    from megatron_fanformer.train.trainer import Trainer

    config, logged = config_from_dict(values), queue.SimpleQueue[logging.LogRecord]()
    handler, logger = logging.handlers.QueueHandler(logged), logging.getLogger("megatron_fanformer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with rank_grid(config.parallel, "cpu") as grid:
            trainer = Trainer(config, grid)
            trainer.train()
            trainer.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [logged.get().getMessage() for _ in range(logged.qsize())]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(metrics["step"], metrics["loss"]) for metrics in read_metrics(run)]


def address_at(port: int, rank: int = 0, size: int = 2) -> devices.RankAddress:
    numbers = {"rank": rank, "world_size": size, "local_rank": rank, "local_world_size": size, "master_port": port}
    return devices.RankAddress(**numbers, master_address="127.0.0.1")


LOCAL = "0100007F"  # 127.0.0.1, as the kernel writes it


def children(process: int) -> list[int]:
    """The processes that a process's main thread has started."""
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def listened_at(process: int) -> set[str]:
    """The addresses, in hexadecimal, at which a process waits for connections."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    texts = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    is_listening = "0A"
    return {line[1].split(":")[0] for line in lines if line[3] == is_listening and f"socket:[{line[9]}]" in sockets}


def test_ranks_meet_at_a_launchers_store_and_anew_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = loopback_store()
    assert listened_at(os.getpid()) == {LOCAL}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = store_of_ranks(address_at(store.port), timedelta(seconds=PATIENCE_SECONDS))
    first.set("key", "value")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not store_of_ranks(address_at(store.port), timedelta(seconds=PATIENCE_SECONDS)).check(["key"])


def test_a_first_rank_that_is_not_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FanformerError, match=r"^rank 1 of 2 cannot meet the others at tcp://127\.0\.0\.1:1 "):
        store_of_ranks(address_at(1, rank=1), timedelta(seconds=1))


class Met(Exception):
    """Ends a test where ranks would have met."""


@pytest.mark.parametrize(("minutes", "meeting"), [(30, 30), (3, 10)])
def test_the_limit_of_ranks_is_in_minutes(minutes: int, meeting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a collective, and of the store that ranks meet at, where they have ten at least."""
    given: list[Any] = []

    def join(*_: Any, store: Any, timeout: timedelta, **__: Any) -> Any:
        given.extend((store.underlying_store.timeout, timeout))
        raise Met

    monkeypatch.setattr(dist, "init_process_group", join)
    runtime = RuntimeConfig(device="cpu", threads_per_rank=torch.get_num_threads(), distributed_timeout_minutes=minutes)
    alone = address_at(loopback_store().port, size=1)
    with pytest.raises(Met), parallel.process_group(runtime, alone):
        pass
    assert given == [timedelta(minutes=meeting), timedelta(minutes=minutes)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_that_a_signal_stopped_goes_on_as_if_it_had_not(
    run_on_ranks: Callable[..., list[Any]], tmp_path: Path, tokens: str, workers: int
) -> None:
    """The signal reaches loader workers too, whose batches the step in progress still needs."""
    training = {"train_iters": 20, "global_batch_size": 8, "micro_batch_size": 4}
    sections: dict[str, Any] = {"parallel": TP2, "training": training}
    values = small_run(tokens, tmp_path / "stopped", data={"num_workers": workers}, **sections)
    config = str(write_config(tmp_path / "config.yaml", values))
    process = start_command("train", "--config", config)
    metrics = tmp_path / "stopped" / METRICS
    wait_until(lambda: metrics.is_file() and metrics.stat().st_size, process)
    assert {address for number in (process.pid, *children(process.pid)) for address in listened_at(number)} == {LOCAL}
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 5, errors
    first, second, *rest = output.splitlines()
    assert first == "starting 2 ranks on this machine (tp=2)"
    assert second.endswith(f" parameters, 20 steps, in {tmp_path / 'stopped'}")
    assert [line for line in rest if not line.startswith("step ")][3:] == []
    assert errors.splitlines() == ["megatron-fanformer: stopped on SIGTERM, saved; run the same command to continue"]
    steps_before = len(losses(tmp_path / "stopped"))
    saved = [folder.name for folder in (tmp_path / "stopped" / "checkpoints").glob("step-*")]
    assert saved == [f"step-{steps_before:08d}"]

    message = run_on_ranks(2, train_here, values)  # what `train` does on a rank that it started
    assert any(line.startswith(f"continuing after step {steps_before}") for line in message[0])
    run_on_ranks(2, train_here, small_run(tokens, tmp_path / "straight", **sections))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")


@pytest.mark.parametrize(
    ("error", "launched_here", "already_reported", "waited"),
    [
        (FanformerError("it is gone"), True, True, [launch.CLOSING_SECONDS]),  # the launcher cuts it short
        (FanformerError("it is gone"), False, True, [launch.PEER_FAILURE_WAIT_SECONDS]),
        (FanformerError("it is gone"), True, False, []),
        (Interrupted("stopped after step 2"), True, True, []),  # for these it waits
    ],
)
def test_a_rank_that_another_speaks_for_lets_it_write_its_last_logs(
    error: FanformerError,
    launched_here: bool,
    already_reported: bool,
    waited: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(devices, "launched_here", lambda: launched_here)
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    error.already_reported = already_reported
    with pytest.raises(type(error)), launch.report_failure():
        raise error
    assert slept == waited


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FanformerError("no space left"), "rank 1: no space left"),
        (launch.PeerFailed("rank 0: no space left"), "rank 0: no space left"),
        (DivergenceError("step 3: the loss is nan"), "step 3: the loss is nan"),
    ],
)
def test_a_rank_is_blamed_for_what_it_alone_has_met(
    error: FanformerError, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    launch._leave_for_launcher(error)
    process: Any = SimpleNamespace(returncode=error.exit_code)
    failure = launch._Rank(number=1, process=process, error=tmp_path / "error.json").failure(None)
    assert (str(failure), failure.exit_code) == (says, error.exit_code)


@pytest.mark.parametrize("says", ["no space left", None])
def test_a_rank_that_a_signal_killed_ends_the_run_with_exit_code_1(
    says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: Any = SimpleNamespace(
        poll=lambda: -signal.SIGKILL, returncode=-signal.SIGKILL, kill=lambda: None, wait=lambda _seconds: None
    )

    def started(_arguments: Any, environment: dict[str, str]) -> Any:
        monkeypatch.setenv(ERROR_FILE, environment[ERROR_FILE])
        if says is not None:
            launch._leave_for_launcher(FanformerError(says))
        return killed

    monkeypatch.setattr(launch, "_start_rank", started)
    with pytest.raises(launch.RankFailed, match=f"^rank 0: {says or 'was killed by SIGKILL'}$") as caught:
        launch.launch_ranks(1, [], threads=1, payload=None)
    assert caught.value.exit_code == 1


def test_ranks_have_ten_minutes_to_save_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, signals = [0.0], []
    passing = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(launch, "time", passing)
    process: Any = SimpleNamespace(poll=lambda: None, send_signal=signals.append)
    ranks = [launch._Rank(number=number, process=process, error=tmp_path / "error.json") for number in range(2)]
    with pytest.raises(launch.RankFailed, match="rank 0 was not done 600 s after the signal"):
        launch._wait_for(ranks, deque([signal.SIGTERM]))
    assert signals == [signal.SIGTERM] * 2
    assert 600 < now[0] < 601


def test_a_second_signal_while_ranks_save_is_not_passed_on(tmp_path: Path) -> None:
    codes, signals = iter([None] * 10), []
    process: Any = SimpleNamespace(poll=lambda: next(codes, Interrupted.exit_code), send_signal=signals.append)
    rank = launch._Rank(number=0, process=process, error=tmp_path / "error.json")
    with pytest.raises(Interrupted, match="stopped on SIGTERM, saved"):
        launch._wait_for([rank], deque([signal.SIGTERM, signal.SIGINT]))
    assert signals == [signal.SIGTERM]


def test_where_a_rank_was_stopped_others_fail_for_lack_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for number, error in enumerate((FanformerError("connection closed"), Interrupted("stopped on SIGTERM at once"))):
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / f"{number}.json"))
        launch._leave_for_launcher(error)
        process: Any = SimpleNamespace(poll=lambda code=error.exit_code: code, returncode=error.exit_code)
        ranks.append(launch._Rank(number=number, process=process, error=tmp_path / f"{number}.json"))
    with pytest.raises(Interrupted, match="stopped on SIGTERM at once"):
        launch._wait_for(ranks, deque())
