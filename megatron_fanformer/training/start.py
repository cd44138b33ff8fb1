"""Starts a run: checks it, then runs it in this process, launches local ranks, or joins the ranks it is given."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import RunConfig, load_config, tell_on_stderr
from megatron_fanformer.training.preflight import RunStart, check_run
from megatron_fanformer.training.run_log import RunLog, log_file, run_log

if TYPE_CHECKING:
    from megatron_fanformer.runtime.parallel import RankGrid


def start_run(file: Path, overrides: Sequence[str], arguments: Sequence[str], log: Path | None = None) -> None:
    """Run a configuration on this machine, on as many local ranks as its layout asks for.

    Args:
        arguments: this command's own, for the ranks to be started with.
        log: the log file, if the command names one.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    # Before its checkpoint is chosen: a run that is about to end may be saving another one.
    with run_log(rank=0) as started, run_lock(Path(config.training.run_dir)):
        start = check_run(config, None)
        import torch  # after errors are reported

        ranks = config.parallel.resolve_data_parallel_size(None) * config.parallel.model_parallel_size
        kind = devices.resolve_device(config.runtime.device)
        if config.runtime.backend(kind) == "nccl" and ranks > torch.cuda.device_count():
            raise InputError(
                f"the layout asks for {ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs; change "
                "parallel, start on several nodes with torchrun, or let ranks share a GPU with "
                "runtime.distributed_backend gloo"
            )
        if ranks > 1:
            from megatron_fanformer.runtime.launch import launch_ranks

            threads = config.runtime.threads_per_rank or devices.threads_per_rank(ranks)
            launch_ranks(ranks, arguments, threads=threads, found=start)
            return
        started.write_to(log_file(config.logging, log, rank=0, world_size=1))
        from megatron_fanformer.runtime.parallel import distributed

        with distributed(config.parallel, None, config.runtime) as grid:
            _train(config, grid, start, started)


def run_rank(file: Path, overrides: Sequence[str], address: devices.RankAddress, log: Path | None = None) -> None:
    """Run a configuration as one of the ranks that a launcher started.

    Each rank checks what it needs to join the others; all else is checked by rank 0, or was by our own launcher.

    Args:
        log: the log file, if the command names one.

    Raises:
        InputError, CorruptError: like `check_run`, on every rank.
    """
    tell = tell_on_stderr if address.rank == 0 and not devices.launched_here() else _tell_nothing  # reported already
    config = load_config(file, overrides, tell=tell)
    if found := [*config.parallel.problems(), *config.runtime.problems()]:
        raise InputError("\n".join(found))
    config.parallel.resolve_data_parallel_size(address.world_size)
    from megatron_fanformer.runtime.agreement import on_main
    from megatron_fanformer.runtime.launch import read_found
    from megatron_fanformer.runtime.parallel import process_group, rank_grid

    with run_log(address.rank) as started, ExitStack() as held:
        started.write_to(log_file(config.logging, log, rank=address.rank, world_size=address.world_size))
        with process_group(config.runtime, address) as kind:

            def find() -> RunStart:
                if (found := read_found()) is not None:
                    return cast(RunStart, found)
                held.enter_context(run_lock(Path(config.training.run_dir)))
                return check_run(config, address.world_size)

            start = on_main(find)
            with rank_grid(config.parallel, kind, config.runtime) as grid:
                _train(config, grid, start, started)


def _train(config: RunConfig, grid: "RankGrid", start: RunStart, log: RunLog) -> None:
    from megatron_fanformer.training.trainer import Trainer  # after megatron-core was prepared

    trainer = Trainer(config, grid, start, log.console)
    try:
        trainer.train()
    finally:
        trainer.close()


def _tell_nothing(_notice: str) -> None:
    """For ranks whose launcher, or first rank, has reported it."""
