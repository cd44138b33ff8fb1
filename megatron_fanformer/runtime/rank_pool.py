"""A pool of gloo ranks, kept alive for the whole test session: importing megatron-core costs seconds a process.

`run_on_ranks(n, function, *arguments)` runs a module-level function on the first n ranks of the pool, each in a fresh
process group of n, and returns what each rank returned.
"""

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

JOB_SECONDS = 240
END_SECONDS = 5


class RankPool:
    """Rank processes, started when first asked for and ended with the session, or when a job fails."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Any]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(*arguments)` on every one of `world_size` ranks; the first rank's error is raised here."""
        while len(self._ranks) < world_size:
            self._ranks.append(_start_rank(len(self._ranks)))
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store-{self._jobs}")
        connections = [connection for _, connection in self._ranks[:world_size]]
        for connection in connections:
            connection.send((function, arguments, world_size, store))
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = [connection for rank, connection in enumerate(connections) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=JOB_SECONDS)
            if not ready:
                self.close()
                raise TimeoutError(f"{function.__name__} took longer than {JOB_SECONDS} s on {world_size} ranks")
            for connection in ready:
                rank = connections.index(connection)
                ok, value = connection.recv()
                if not ok:
                    self.close()  # the other ranks may wait for this one for ever
                    raise AssertionError(f"rank {rank} of {world_size}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all ranks."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(END_SECONDS)  # a rank that ends by itself ends its checkpoint writer's processes too
            process.kill()
            process.join()
        self._ranks = []


def _start_rank(rank: int) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, rank), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _serve(connection: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megatron_fanformer.runtime import device, megatron_cpu

    device.quieten_libraries()
    megatron_cpu.install()
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, world_size, store = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            result = function(*arguments)
            dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc(limit=-4)))
            return
