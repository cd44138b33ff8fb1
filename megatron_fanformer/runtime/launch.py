"""Launch local ranks, pass signals on to them, and report which rank failed first, and why.

Each rank is this same program (`python -m megatron_fanformer` with the same arguments), which finds the rank's
address in its environment and joins. Ranks end with their launcher, however it ends, and all of them with the first
that fails. (torch's elastic agent waits 30 s for ranks that are stuck, and leaves its ranks behind when it is killed.)
"""

import json
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import DivergenceError, FanformerError, InputError, Interrupted
from megatron_fanformer.processes import NOTHING_LOST, SAVE_SIGNAL, end_with_owner, end_with_parent, signals_to
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import RuntimeConfig

STOP_GRACE_SECONDS = 600  # how long a rank may take to save after a signal to stop, and to end after another ended
FAILURE_GRACE_SECONDS = 0.5  # for other ranks that fail at the same time, since their errors may tell more
KILLED_SECONDS = 10.0  # how long to wait for a killed rank
POLL_SECONDS = 0.05
PEER_FAILURE_WAIT_SECONDS = 15.0  # a rank that lost a peer lets the peer's own error be seen first
CLOSING_SECONDS = 90.0  # for rank 0's last logs once the others have ended: W&B takes a minute at most


def refuse_ranks_without_gpu(ranks: int, runtime: RuntimeConfig, *, origin: str, remedy: str) -> None:
    """Raise InputError if each of `ranks` local ranks needs a GPU, and this machine has fewer.

    Args:
        origin: the setting that requires so many ranks, for the message.
        remedy: the end of the message.
    """
    import torch  # it takes seconds, and errors in the configuration are reported before

    kind = devices.resolve_device(runtime.device)
    if runtime.backend(kind) == "nccl" and ranks > (count := torch.cuda.device_count()):
        raise InputError(f"{origin} asks for {ranks} ranks, but this machine has {count} GPUs; {remedy}")


class RankFailed(FanformerError):
    """A local rank failed; the message and `exit_code` are that rank's own."""

    def __init__(self, message: str, exit_code: int = FanformerError.exit_code, traceback: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank_traceback = traceback


class PeerFailed(FanformerError):
    """Another rank failed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A rank that this process started."""

    number: int
    process: "subprocess.Popen[bytes]"
    error: Path  # the file to which the rank writes the error with which it fails

    @property
    def code(self) -> int | None:
        """Return the process's exit code, negative for a signal; None while it is running."""
        return self.process.poll()

    @property
    def has_failed(self) -> bool:
        """Return whether the rank has ended with an error; one that saved on a signal to stop has written no error."""
        return self.code not in (None, 0) and (self.code != Interrupted.exit_code or self.error.exists())

    def failure(self, stop: signal.Signals | None) -> FanformerError:
        """Return the error to raise for this failed rank; `stop` is the signal that stopped the launcher, if any."""
        code, message, stack = self.process.returncode, "", ""
        with suppress(OSError, ValueError):
            report = json.loads(self.error.read_text())["message"]
            message, stack = report["message"], report["extraInfo"]["py_callstack"]
        if code == Interrupted.exit_code:  # ranks get SIGTERM in place of any signal to stop
            return Interrupted(message.replace(signal.SIGTERM.name, stop.name, 1) if stop else message)
        if stop and code == -signal.SIGTERM:  # before the rank handled signals
            return Interrupted(f"stopped on {stop.name} {NOTHING_LOST}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailed(message or f"rank {self.number}: {how}", max(code, 1), stack)


def launch_ranks(num_ranks: int, arguments: Sequence[str], *, threads: int, payload: Any) -> None:
    """Run `python -m megatron_fanformer ARGUMENTS` as `num_ranks` local ranks, and wait for them.

    Args:
        payload: an object that the ranks get by `read_payload`, such as all that this process has checked.

    Raises:
        RankFailed: a rank failed, and the others were ended; or a rank could not save after a signal.
        Interrupted: a signal stopped this process or a rank, and the ranks have saved.
    """
    from megatron_fanformer.runtime.agreement import loopback_store  # torch takes a second

    # Only this user may write to the folder, so the ranks may unpickle from it.
    with tempfile.TemporaryDirectory(prefix="fanformer-") as folder:
        file = Path(folder) / "payload"
        file.write_bytes(pickle.dumps(payload))
        store = loopback_store()  # serves the ranks for as long as this object exists
        signals: deque[signal.Signals] = deque()
        ranks: list[_Rank] = []
        with signals_to(signals.append):
            try:
                for number in range(num_ranks):
                    error = Path(folder) / f"error-{number}.json"
                    environment = devices.rank_environment(
                        number, num_ranks, threads=threads, store_port=store.port, payload=file, error=error
                    )
                    ranks.append(_Rank(number=number, process=_start_rank(arguments, environment), error=error))
                _wait_for(ranks, signals)
            finally:
                for rank in ranks:
                    rank.process.kill()
                for rank in ranks:
                    with suppress(subprocess.TimeoutExpired):  # the kernel may keep a rank that waits for a device
                        rank.process.wait(KILLED_SECONDS)


def _start_rank(arguments: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-u", "-m", "megatron_fanformer", *arguments]
    # In a session of its own: a terminal's signals are for this process, which passes them on.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _wait_for(ranks: list[_Rank], signals: "deque[signal.Signals]") -> None:
    """Wait until all ranks have ended or one has failed; pass on requests to save, and the first signal to stop.

    Raises:
        RankFailed: a rank failed, or did not end in time after a signal or the end of another rank.
        Interrupted: ranks ended because of a signal.
    """
    stop: signal.Signals | None = None
    deadline = float("inf")
    while any(rank.code is None for rank in ranks) and not any(rank.has_failed for rank in ranks):
        while signals:
            number = signals.popleft()
            if number == SAVE_SIGNAL:
                ranks[0].process.send_signal(number)  # rank 0 passes the request to the others
            elif stop is None:
                stop = number
                for rank in ranks:
                    rank.process.send_signal(signal.SIGTERM)
        if stop or any(rank.code is not None for rank in ranks):
            deadline = min(deadline, time.monotonic() + STOP_GRACE_SECONDS)  # counts from the first such moment
        if time.monotonic() > deadline:
            late = next(rank.number for rank in ranks if rank.code is None)
            raise RankFailed(
                f"rank {late} was not done {STOP_GRACE_SECONDS} s after the {'signal' if stop else 'end of another'}; "
                "it was killed, run the same command to continue from the last checkpoint"
            )
        time.sleep(POLL_SECONDS)
    if any(rank.has_failed for rank in ranks):
        grace = time.monotonic() + FAILURE_GRACE_SECONDS
        while time.monotonic() < grace and any(rank.code is None for rank in ranks):
            time.sleep(POLL_SECONDS)
        # If a signal stopped one rank, the others fail only because that rank is gone.
        failures = [rank.failure(stop) for rank in ranks if rank.has_failed]
        raise next((failure for failure in failures if isinstance(failure, Interrupted)), failures[0])
    if any(rank.code for rank in ranks):  # a rank that has not failed, and so has saved on a signal
        name = stop.name if stop else "a signal to a rank"
        raise Interrupted(f"stopped on {name}, saved; run the same command to continue")


# -- on a rank


def read_payload() -> Any:
    """Return the payload of `launch_ranks` to this rank; None if another program launched this rank."""
    file = devices.payload_file()
    return None if file is None else pickle.loads(file.read_bytes())


def end_with_launcher() -> None:
    """Make this rank end when the process that launched it ends; must be called before the rank's work.

    Our launcher ends without its ranks only on SIGKILL; the ranks then end at once. torchrun ends on a second signal
    while its ranks still save; the ranks then get the signal to stop once more. (Slurm ends its ranks itself.)
    """
    if (launcher := devices.launcher_process()) is not None:
        end_with_owner(launcher)
    elif devices.launched_by_torchrun():
        end_with_parent(signal.SIGTERM)


@contextmanager
def report_failure() -> Iterator[None]:
    """Report the error of a rank's work to its launcher, then let it propagate."""
    try:
        yield
    except Interrupted as error:
        if error.is_final:  # nothing was saved; the launcher takes a rank without an error file for one that saved
            error.already_reported = devices.rank_number() != 0
            _leave_for_launcher(error)
        raise
    except Exception as error:
        if getattr(error, "already_reported", False):
            # The user must see the peer's error, not this one. Our launcher ends all ranks with the first that fails:
            # this rank waits, so that the peer writes its last logs and fails first.
            time.sleep(CLOSING_SECONDS if devices.launched_here() else PEER_FAILURE_WAIT_SECONDS)
        _leave_for_launcher(error)
        raise


def _leave_for_launcher(error: Exception) -> None:
    """Write an error to the file in which the launcher expects one, if any, in the format of torch's launchers."""
    file = devices.error_file()
    if file is None:
        return
    text = str(error) if isinstance(error, FanformerError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, Interrupted | PeerFailed | DivergenceError):  # all ranks raise these: no rank to name
        text = f"rank {devices.rank_number()}: {text}"
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    with suppress(OSError):  # a full disk must not hide the error
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
