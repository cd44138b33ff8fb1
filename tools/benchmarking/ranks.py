"""The processes of a case, which take steps on request: ranks with a Trainer, or another program."""

import dataclasses
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.processes import end_with_parent
from megatron_fanformer.runtime import device as devices

END_SECONDS = 20
MANY_STEPS = 100_000  # more than any benchmark takes


class Ended(SystemExit):
    """A process ended unexpectedly; its message is on standard error."""


class CaseProcesses:
    """The processes of a case. They start by importing; `begin` makes their trainers, and `steps` takes steps.

    Args:
        program: the function that each process calls, with a connection and the process's arguments.
        arguments: the arguments for each process.
    """

    def __init__(self, program: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for process_arguments in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_quietly, args=(program, theirs, *process_arguments))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def begin(self) -> None:
        """Wait until all processes have imported, and let them make their trainers; until then no GPU is used."""
        self._answers()
        self._ask("begin")

    def steps(self, number: int) -> float:
        """Take some steps in a row; return the mean seconds of a step on rank 0."""
        return self._ask("steps", number)[0]

    def peak_memory(self) -> int:
        """Return the sum over ranks of the peak memory in bytes: resident on a CPU, allocated on a GPU."""
        return sum(self._ask("peak_memory"))

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(END_SECONDS)
            process.kill()

    def _ask(self, command: str, *arguments: Any) -> list[Any]:
        try:
            for connection in self._connections:
                connection.send((command, arguments))
        except BrokenPipeError:
            raise Ended("a process of the benchmark ended; its message stands above") from None
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            return [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionResetError):
            raise Ended("a process of the benchmark ended; its message stands above") from None


def _quietly(program: Callable[..., None], *arguments: Any) -> None:
    end_with_parent()  # not as a daemon, which may have no loaders
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # what a run reports to its user
        program(*arguments)


def serve(connection: Any, make: Callable[[], Any]) -> Any:
    """Make an object on the request `begin`, answer others by its methods, and return it when the connection closes."""
    target = None
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return target
        if command == "begin":
            target = make()
            connection.send(None)
        else:
            connection.send(getattr(target, command)(*arguments))


def ranks_of(values: dict[str, Any], world_size: int) -> CaseProcesses:
    """Start the ranks of a run; `values` is the configuration as plain values."""
    port = _free_port()
    return CaseProcesses(_serve_rank, [(values, rank, world_size, port) for rank in range(world_size)])


def _serve_rank(connection: Any, values: dict[str, Any], rank: int, world_size: int, port: int) -> None:
    from megatron_fanformer.train.config import config_from_dict

    config = config_from_dict(values)
    devices.prepare_megatron(config.run_shape(world_size), on_cpu=config.runtime.device == "cpu")  # as `train` does
    from megatron_fanformer.model.layer_spec import transformer_engine_problem
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.train import trainer  # noqa: F401  takes seconds

    transformer_engine_problem()  # imports the Engine
    connection.send("ready")
    with ExitStack() as stack:
        address = devices.RankAddress(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_address="localhost",
            master_port=port,
        )

        def make() -> Rank:
            alone = address if world_size > 1 else None
            return Rank(config, stack.enter_context(distributed(config.parallel, alone, config.runtime)))

        made = serve(connection, make)
        if made is not None:
            made.trainer.close()


class Rank:
    """A whole Trainer on one rank, whose steps are timed."""

    def __init__(self, config: Any, grid: Any) -> None:
        from megatron_fanformer.train import trainer

        self.trainer = trainer.Trainer(config, grid)
        self._config = config
        self._is_cuda = grid.device == "cuda"

    def steps(self, number: int) -> float:
        """Take some steps in a row; return the mean seconds of a step, including the run's work between steps."""
        self._wait()
        started = time.perf_counter()
        for _ in range(number):
            self.trainer.take_step()
        self._wait()
        return (time.perf_counter() - started) / number

    def peak_memory(self) -> int:
        """Return the peak memory so far in bytes: resident on a CPU, allocated on a GPU."""
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_values(model: FANformerConfig, dtype: str, tokens: str, run: Path, *, device: str) -> dict[str, Any]:
    """Return the configuration of a run as plain values; the batch sizes are the caller's."""
    return {
        "model": dataclasses.asdict(model),
        # Ranks wait for their turn: that must not count as a hang.
        "runtime": {"device": device, "distributed_timeout_minutes": 60.0},
        "precision": {"dtype": dtype},
        "data": {"train_data": [tokens]},
        "training": {"run_dir": str(run), "train_iters": MANY_STEPS},
        "logging": {"log_interval": MANY_STEPS},
    }


def write_tokens(prefix: Path, vocab_size: int, number: int) -> str:
    """Write random tokens as token files; return their prefix."""
    import numpy as np

    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    builder.add_document(np.random.default_rng(0).integers(vocab_size, size=number), [number])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
