"""Launches local ranks with torch's elastic agent, and reports to the caller which rank failed first, and why.

Each rank is this same program (`python -m megatron_fanformer` with the same arguments), which finds the rank's
address in its environment and joins.
"""

import json
import logging
import pickle
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from megatron_fanformer.errors import FanformerError, Interrupted
from megatron_fanformer.processes import STOP_SIGNALS
from megatron_fanformer.runtime.device import end_launch, found_by_launcher, prepare_launch

STOP_GRACE_SECONDS = 600  # how long a rank may take to save after a signal to stop
PEER_FAILURE_WAIT_SECONDS = 5.0  # a rank that lost a peer lets the peer's own error be seen first
PEER_FAILURE_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "unhandled system error")


class RankFailed(FanformerError):
    """A local rank failed; the message and `exit_code` are that rank's own."""

    def __init__(self, rank: int, message: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(f"rank {rank}: {message}")
        self.exit_code = exit_code
        self.rank_traceback = traceback


class _FailFastAgent(LocalElasticAgent):
    """The elastic agent, which ends all ranks at once when one fails, and lets them save when it is told to stop."""

    def _stop_workers(self, *_args: Any, **_kwargs: Any) -> None:
        if self._pcontext:
            self._pcontext.close(signal.SIGKILL)

    def _shutdown(self, *_args: Any, **_kwargs: Any) -> None:
        if self._pcontext:
            self._pcontext.close(signal.SIGTERM, STOP_GRACE_SECONDS)

    def ends(self) -> dict[int, ProcessFailure]:
        """How each rank ended, by rank number, once all have; empty if none was started."""
        context: Any = self._pcontext
        if context is None:
            return {}
        return {
            rank: ProcessFailure(rank, handler.proc.pid, handler.proc.returncode, context.error_files[rank])
            for rank, handler in context.subprocess_handlers.items()
        }


def launch_ranks(num_ranks: int, arguments: Sequence[str], *, threads: int, found: Any) -> None:
    """Run `python -m megatron_fanformer ARGUMENTS` as `num_ranks` local ranks, and wait for them.

    Args:
        found: what the ranks use instead of finding it again; they get it through `read_found`.

    Raises:
        RankFailed: a rank failed, and the others were ended; or a rank could not save after a signal.
        Interrupted: a signal stopped this process, and the ranks after they saved.
        FanformerError: a signal came before any rank had started.
    """
    # In a folder that only this user may write to: what is unpickled from it is this program's own.
    with tempfile.TemporaryDirectory(prefix="fanformer-") as folder:
        file = Path(folder) / "found"
        file.write_bytes(pickle.dumps(found))
        prepare_launch(threads=threads, stop_signals=",".join(number.name for number in STOP_SIGNALS), found=file)
        try:
            _run_agent(num_ranks, arguments)
        finally:
            end_launch()


def read_found() -> Any:
    """What this rank's launcher found; None where another program launched it."""
    file = found_by_launcher()
    return None if file is None else pickle.loads(file.read_bytes())


def _run_agent(num_ranks: int, arguments: Sequence[str]) -> None:
    """Raises like `launch_ranks`."""
    _quieten_agent()
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        is_host=True,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=("-u", "-m", "megatron_fanformer", *arguments),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    agent = _FailFastAgent(spec=spec, logs_specs=DefaultLogsSpecs())
    try:
        with _signal_handlers_kept():
            result = agent.run()
    except SignalException as stop:
        _tell_how_ranks_stopped(agent.ends(), stop.sigval.name)
        return
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        raise _first_failure(result.failures)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them in place: afterwards this process handles signals as before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quieten_agent() -> None:
    """What it would report is reported here; its loggers have levels of their own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _tell_how_ranks_stopped(ends: dict[int, ProcessFailure], signal_name: str) -> None:
    """Raise what a signal led to; nothing if the run was over before it took effect."""
    failed = {rank: end for rank, end in ends.items() if end.exitcode not in (0, Interrupted.exit_code)}
    if failed:
        raise _first_failure(failed)
    if not ends:
        raise FanformerError(f"stopped on {signal_name} before a rank had started; start again")
    if any(end.exitcode for end in ends.values()):
        raise Interrupted(f"stopped on {signal_name}, saved; run the same command to continue")


def _first_failure(failures: dict[int, ProcessFailure]) -> RankFailed:
    rank, failure = ChildFailedError(name="rank", failures=failures).get_first_failure()
    details = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    if isinstance(details, dict):
        return RankFailed(
            rank, details["message"], failure.exitcode, details.get("extraInfo", {}).get("py_callstack", "")
        )
    if failure.exitcode < 0:
        return RankFailed(rank, f"was killed by {failure.signal_name()}", 1)
    return RankFailed(rank, f"ended with exit code {failure.exitcode}", failure.exitcode)


@contextmanager
def report_failure() -> Iterator[None]:
    """Around a rank's work: leaves its error where the launcher finds it, then lets it propagate."""
    try:
        yield
    except Exception as error:
        if getattr(error, "is_told_elsewhere", False) or any(sign in str(error) for sign in PEER_FAILURE_SIGNS):
            # Not this rank's own failure: the peer's is the one that the user must see, and is about to be noticed.
            time.sleep(PEER_FAILURE_WAIT_SECONDS)
        handler = get_error_handler()
        handler.record_exception(error)
        _shorten_message(handler, error)
        raise


def _shorten_message(handler: Any, error: Exception) -> None:
    """The recorded message without the exception's class if it is one of ours, which need no class name."""
    file = handler._get_error_file_path()
    if file and isinstance(error, FanformerError):
        data = json.loads(Path(file).read_text())
        data["message"]["message"] = str(error)
        Path(file).write_text(json.dumps(data))
