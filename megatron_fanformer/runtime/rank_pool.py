"""A pool of local ranks, kept alive between jobs: importing megatron-core costs seconds per process.

`RankPool().run(n, function, *arguments)` runs a module-level function on the first n ranks, in a process group of n
that is made for the job, and returns what each rank returned.

Ranks on a CPU are forks of one process, the fork server, which imports for all of them and does nothing else. On a GPU
each imports for itself: a fork cannot use CUDA once it has been looked for.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.processes import end_with_owner
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.config import DEFAULT_RUNTIME
from megatron_fanformer.runtime.garbage import freeze_gc

CONTEXT = multiprocessing.get_context("spawn")
END_SECONDS = 5
LAST_FRAMES = -4  # of a rank's traceback: what is above is the pool's own


class JobFailed(FanformerError):
    """A rank failed or did not answer; the pool's ranks were ended, and new ones start with the next job."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class _Setting(NamedTuple):
    device: devices.DeviceKind
    backend: str
    prepare: Callable[[], None]


class RankPool:
    """Rank processes, started on first use and ended by `close`, or when a job fails.

    Args:
        device: what the ranks run on; rank r takes GPU r.
        job_seconds: how long a job may take.
        backend: how they communicate; None: as runs do on that device.
        prepare: a module-level function that readies a new rank's libraries, before it imports any.
    """

    def __init__(
        self,
        device: devices.DeviceKind = "cpu",
        job_seconds: float = 240,
        *,
        backend: str | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.device = device
        communication = backend or DEFAULT_RUNTIME.backend(device)
        self._setting = _Setting(device, communication, prepare or devices.prepare_megatron)
        self._has_fork_server = device == "cpu" or prepare is not None  # else on real GPUs
        self._job_seconds = job_seconds
        self._processes: list[Any] = []  # the fork server, or the ranks
        self._fork_server: Any = None  # the connection to it
        self._ranks: list[Any] = []  # the connections to them
        self._port = 0  # of the store at which they meet, which the first one hosts
        self._jobs = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(*arguments)` on every one of `world_size` ranks.

        Raises:
            JobFailed: a rank raised, died, or the job took too long; has the first such rank's traceback.
        """
        while len(self._ranks) < world_size:
            self._start_rank(function)
        connections = self._ranks[:world_size]
        self._port = self._port or self._answers(connections[:1], world_size)[0]
        self._jobs += 1
        for connection in connections:
            connection.send((function, arguments, world_size, self._port, f"job {self._jobs}", self._job_seconds))
        return self._answers(connections, world_size)

    def _answers(self, connections: Sequence[Any], world_size: int) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(connections):
            waiting = [connection for rank, connection in enumerate(connections) if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, timeout=self._job_seconds)
            if not ready:
                self.close()
                raise JobFailed(f"took longer than {self._job_seconds:g} s on {world_size} ranks")
            for connection in ready:
                rank = connections.index(connection)
                answers[rank] = self._answer(connection, rank, world_size)
        return [answers[rank] for rank in range(len(connections))]

    def _answer(self, connection: Any, rank: int, world_size: int) -> Any:
        try:
            succeeded, value = connection.recv()
        except (EOFError, OSError):
            succeeded, value = False, "it died"
        if not succeeded:
            self.close()  # the other ranks may wait for this one forever
            raise JobFailed(f"rank {rank} of {world_size}: {value}", rank)
        return value

    def close(self) -> None:
        """End all ranks."""
        for connection in (*self._ranks, *filter(None, [self._fork_server])):
            connection.close()
        for process in self._processes:
            process.join(END_SECONDS)  # a rank that ends by itself ends its checkpoint writer's processes too
            process.kill()
            process.join()
        self._processes, self._fork_server, self._ranks, self._port = [], None, [], 0

    def _start_rank(self, function: Callable[..., Any]) -> None:
        """Start one more; `function` is its first job's."""
        rank = len(self._ranks)
        ours, theirs = CONTEXT.Pipe()
        with theirs:
            if not self._has_fork_server:
                self._start_process(_serve_alone, theirs, rank)
            else:
                if self._fork_server is None:
                    self._fork_server, server_end = CONTEXT.Pipe()
                    with server_end:
                        self._start_process(_fork_ranks, server_end)
                    self._fork_server.send(function)
                with suppress(OSError):  # it has ended: the rank will not answer
                    self._fork_server.send(rank)
                    reduction.send_handle(self._fork_server, theirs.fileno(), self._processes[0].pid)
        self._ranks.append(ours)

    def _start_process(self, target: Callable[..., None], *arguments: Any) -> None:
        process = CONTEXT.Process(target=target, args=(self._setting, *arguments), daemon=False)
        process.start()
        self._processes.append(process)


def _fork_ranks(setting: _Setting, connection: Any) -> None:
    """Run the fork server: it forks a rank whenever it is sent one, and ends after the last of them."""
    _begin(setting)
    fork_server = os.getpid()
    with suppress(EOFError, OSError):  # the pool is gone
        connection.recv()  # the first job's function, and so all that it imports
        freeze_gc()  # ranks share it, and do not look through it after every job
        while True:
            rank, descriptor = connection.recv(), reduction.recv_handle(connection)
            if os.fork() == 0:
                _live(setting, connection, Connection(descriptor), rank, fork_server)
            os.close(descriptor)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _live(setting: _Setting, server_connection: Any, connection: Any, rank: int, fork_server: int) -> NoReturn:
    """Run a forked rank, which must never return into its fork server's code."""
    try:
        server_connection.close()
        end_with_owner(fork_server)
        _serve(setting, connection, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _serve_alone(setting: _Setting, connection: Any, rank: int) -> None:
    _begin(setting)
    _serve(setting, connection, rank)


def _begin(setting: _Setting) -> None:
    """Ready a process, whose owner is the pool's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's owner, which closes the connection
    end_with_owner()
    devices.prepare_libraries()
    setting.prepare()


def _serve(setting: _Setting, connection: Any, rank: int) -> None:
    """Run a rank's jobs one after the other, until the pool closes the connection or a job fails.

    The first rank hosts the store at which they meet, and first of all answers with its port.
    """
    devices.configure_process(setting.device, rank, threads=1)
    devices.listen_on_loopback()
    with suppress(EOFError, OSError):  # the pool is gone
        if rank == 0:
            from megatron_fanformer.runtime import meeting

            store = meeting.hosted_store(meeting.LOOPBACK, 0, wait_for_workers=False)
            connection.send((True, store.port))
        while True:
            job, modules = connection.recv(), len(sys.modules)
            try:
                connection.send((True, _run_job(rank, setting.backend, *job)))
            except BaseException:
                connection.send((False, traceback.format_exc(limit=LAST_FRAMES)))
                os._exit(1)  # the process group may be in any state
            if len(sys.modules) > modules:
                freeze_gc()  # the modules that it imported, among others


def _run_job(
    rank: int,
    backend: str,
    function: Callable[..., Any],
    arguments: Any,
    world_size: int,
    port: int,
    name: str,
    job_seconds: float,
) -> Any:
    import torch.distributed as dist

    from megatron_fanformer.runtime.meeting import LOOPBACK

    timeout = timedelta(seconds=job_seconds)  # a rank that dies is noticed by its connection
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world_size, timeout=timeout
    )
    result = function(*arguments)
    if "gloo" in backend:  # a rank that closes its end of the mesh fails those that are still connecting theirs
        dist.barrier()
    _end_groups()
    return result


def _end_groups() -> None:
    """End a job's process groups, all at once: of each, a gloo thread looks up every 10 ms whether it is to end.

    A trainer holds on to its groups by reference cycles. If they were left, a rank would have over a thousand threads
    after a few dozen jobs, and slow down.
    """
    import torch.distributed

    groups = [[group] for group in torch.distributed.distributed_c10d._world.pg_map]
    torch.distributed.destroy_process_group()
    gc.collect()
    with ThreadPoolExecutor(len(groups)) as threads:
        for holder in groups:
            threads.submit(holder.clear)  # of the last reference; the group's end releases Python's lock
