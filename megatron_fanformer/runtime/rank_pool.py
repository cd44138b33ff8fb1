"""A pool of local ranks, kept alive between jobs: importing megatron-core costs seconds per process.

`RankPool().run(n, function, *arguments)` runs a module-level function on the first n ranks, in a process group of n
that is made for the job, and returns each rank's value.

A process of the pool, the host, starts the ranks. On a CPU the ranks are forks of the host, which imports for all of
them. On a GPU each rank imports for itself: a fork cannot use CUDA once its parent has looked for a GPU.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.processes import end_with_owner
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import DEFAULT_RUNTIME

END_SECONDS = 5  # how long the ranks together may take to end by themselves
LAST_FRAMES = -4  # limit of a rank's traceback to the last 4 frames, since the first ones are the pool's


class JobFailed(FanformerError):
    """A rank failed or did not answer; the pool's ranks were ended, and new ones start with the next job."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class _Setting(NamedTuple):
    device: devices.DeviceKind
    backend: str
    job_seconds: float
    prepare: Callable[[], None]
    forks: bool  # whether ranks are forks of their host


class _Job(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    name: str
    port: int = 0  # port of the store at which the ranks meet


class RankPool:
    """Rank processes, started on first use and ended by `close`, or when a job fails.

    Args:
        device: the device of the ranks; rank r takes GPU r.
        job_seconds: how long a job may take.
        backend: the communication backend; None: that of runs on this device.
        prepare: a module-level function that prepares a new rank's libraries before the rank imports any.
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
        forks = device == "cpu" or prepare is not None  # with `prepare`, cuda is a stand-in on the CPU
        self._setting = _Setting(device, communication, job_seconds, prepare or devices.prepare_megatron, forks)
        self._host: tuple[Any, Any] | None = None  # the host's process, and the connection to it
        self._jobs = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(*arguments)` on every one of `world_size` ranks.

        Raises:
            JobFailed: a rank raised (with the traceback of the first such rank) or died, or the job took too long.
        """
        if self._host is None:
            self._host = _start_process(multiprocessing.get_context("spawn"), _host_ranks, self._setting)
        _, connection = self._host
        self._jobs += 1
        try:
            connection.send(_Job(function, arguments, world_size, f"job {self._jobs}"))
            answers, failure, rank = connection.recv()
        except (EOFError, OSError):
            answers, failure, rank = [], "the process that starts the ranks died", None
        if failure is not None:
            self.close()  # the other ranks may wait for this one forever
            raise JobFailed(failure, rank)
        return list(answers)

    def close(self) -> None:
        """End all ranks."""
        if self._host is not None:
            process, connection = self._host
            connection.close()
            process.join(2 * END_SECONDS)
            process.kill()  # the kernel then kills the ranks
            process.join()
            self._host = None


def _start_process(context: Any, target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """Start a process with one end of a new pipe as its last argument; return the process and the other end."""
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=target, args=(*arguments, theirs), daemon=False)
        process.start()
    return process, ours


# -- in the host


def _host_ranks(setting: _Setting, connection: Any) -> None:
    """Start ranks as jobs need them, and pass jobs on to them, until the pool closes the connection."""
    _begin(setting, prepares=setting.forks)
    context: Any = multiprocessing.get_context("fork" if setting.forks else "spawn")
    ranks: list[tuple[Any, Any]] = []
    port = 0  # port of the store at which ranks meet; rank 0 hosts the store and sends the port
    with suppress(EOFError, OSError):  # the pool is gone
        while True:
            job = connection.recv()  # unpickling imports what the job's function needs
            if not ranks:
                gc.freeze()  # forks share the imported objects, and do not collect garbage among them after every job
            while len(ranks) < job.world_size:
                ranks.append(_start_process(context, _serve, setting, len(ranks)))
            connections = [to_rank for _, to_rank in ranks[: job.world_size]]
            port = port or connections[0].recv()
            connection.send(_run_on_ranks(job._replace(port=port), connections, setting.job_seconds))
    for _, to_rank in ranks:
        with suppress(OSError):  # the rank has ended
            to_rank.send(None)  # forked ranks hold this end, too, and do not see it close
    for process, _ in ranks:
        process.join(END_SECONDS / len(ranks))  # a rank that ends by itself ends its checkpoint writer's processes too
        process.kill()


def _run_on_ranks(job: _Job, connections: list[Any], seconds: float) -> tuple[list[Any], str | None, int | None]:
    """Run a job on the ranks at `connections`; return their values or, if it fails, the reason and the failed rank."""
    for connection in connections:
        with suppress(OSError):  # the rank has ended, and does not answer
            connection.send(job)
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        waiting = [connection for rank, connection in enumerate(connections) if rank not in answers]
        ready: list[Any] = multiprocessing.connection.wait(waiting, timeout=seconds)
        if not ready:
            return [], f"took longer than {seconds:g} s on {len(connections)} ranks", None
        for connection in ready:
            rank = connections.index(connection)
            try:
                succeeded, answers[rank] = connection.recv()
            except (EOFError, OSError):
                succeeded, answers[rank] = False, "it died"
            if not succeeded:
                return [], f"rank {rank} of {len(connections)}: {answers[rank]}", rank
    return [answers[rank] for rank in range(len(connections))], None, None


def _begin(setting: _Setting, *, prepares: bool) -> None:
    """Make a process of the pool end with its owner and ignore Ctrl-C; if `prepares`, prepare its libraries."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's owner, which closes the connection
    end_with_owner()
    if prepares:
        devices.prepare_libraries()
        setting.prepare()


# -- in a rank


def _serve(setting: _Setting, rank: int, connection: Any) -> None:
    """Run a rank's jobs one after the other, until the host sends None or is gone, or a job fails.

    Before its first job, rank 0 starts the store at which the ranks meet, and sends the store's port to the host.
    """
    _begin(setting, prepares=not setting.forks)
    devices.configure_process(setting.device, rank, threads=1)
    devices.listen_on_loopback()
    with suppress(EOFError, OSError):  # the host is gone
        if rank == 0:
            from megatron_fanformer.runtime.agreement import loopback_store

            store = loopback_store()
            connection.send(store.port)
        while (job := connection.recv()) is not None:
            modules_before = len(sys.modules)
            try:
                connection.send((True, _run_job(rank, setting, job)))
            except BaseException:
                connection.send((False, traceback.format_exc(limit=LAST_FRAMES)))
                os._exit(1)  # the process group may be in any state
            if len(sys.modules) > modules_before:
                gc.freeze()  # later collections need not search what the job imported
    sys.stdout.flush()
    os._exit(0)


def _run_job(rank: int, setting: _Setting, job: _Job) -> Any:
    """Return the value of the job's function, called in a process group of the job's ranks."""
    import torch.distributed as dist

    from megatron_fanformer.runtime.agreement import LOOPBACK

    timeout = timedelta(seconds=setting.job_seconds)  # a rank that dies is noticed by its connection
    store = dist.TCPStore(LOOPBACK, job.port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        setting.backend,
        store=dist.PrefixStore(job.name, store),
        rank=rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    result = job.function(*job.arguments)
    if "gloo" in setting.backend:  # a rank that left now would fail ranks that are still connecting to it
        dist.barrier()
    _end_groups()
    return result


def _end_groups() -> None:
    """End a job's process groups all at once: each waits for a gloo thread that checks every 10 ms whether to end.

    A trainer keeps its groups alive by reference cycles, which are collected first. Otherwise a rank would have over a
    thousand threads after a few dozen jobs, and slow down.
    """
    import torch.distributed

    holders = [[group] for group in torch.distributed.distributed_c10d._world.pg_map]  # soon the only references
    torch.distributed.destroy_process_group()
    gc.collect()
    with ThreadPoolExecutor(len(holders)) as threads:
        for holder in holders:
            threads.submit(holder.clear)  # ends the group; the wait releases Python's global lock
