"""Starts a run: in this process, on local ranks that it launches, or as one rank that a launcher has started."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.errors import DivergenceError, InputError, Interrupted
from megatron_fanformer.model.layouts import layout_text
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.launch import launch_ranks, read_payload, refuse_ranks_without_gpu
from megatron_fanformer.train.config import RunConfig, load_config, print_on_stderr
from megatron_fanformer.train.preflight import RunStart, find_start
from megatron_fanformer.train.run_log import RunLog, run_log

if TYPE_CHECKING:
    from megatron_fanformer.runtime.parallel import RankGrid

DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

logger = logging.getLogger(__name__)


def start_run(file: Path, overrides: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a configuration on this machine, with as many local ranks as its layout needs.

    Args:
        arguments: the arguments of this command, with which the ranks are launched.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    # Lock the run before choosing its checkpoint: an earlier process may still be saving a newer one.
    with run_log(rank=0) as log, run_lock(Path(config.training.run_dir)):

        def announce_and_prepare() -> None:
            ranks = local_ranks(config)
            if ranks == 1:  # otherwise each launched rank opens its own file
                log.write_to(config.logging.folder)
            _log_start(config, ranks, " on this machine")
            _prepare_libraries(config, ranks)

        start = find_start(config, None, unless_complete=True, before_torch=announce_and_prepare)
        if start is None:
            return
        ranks = local_ranks(config)
        refuse_ranks_without_gpu(
            ranks,
            config.runtime,
            origin="the layout",
            remedy="change parallel, start on several nodes with torchrun, or let ranks share a GPU with "
            "runtime.distributed_backend gloo",
        )
        if ranks > 1:
            threads = config.runtime.threads_per_rank or devices.threads_per_rank(ranks)
            launch_ranks(ranks, arguments, threads=threads, payload=start)
            return
        from megatron_fanformer.runtime.parallel import distributed

        with distributed(config.parallel, None, config.runtime) as grid:
            _train(config, grid, start, log)


def local_ranks(config: RunConfig) -> int:
    """Return the number of ranks of a run that has only this machine."""
    return config.parallel.resolve_data_parallel_size(None) * config.parallel.model_parallel_size


def _log_start(config: RunConfig, ranks: int, place: str = "") -> None:
    """Log the number of ranks and the layout, before torch is imported."""
    sizes = {name: getattr(config.parallel, name) for name in DEGREES}
    sizes["data_parallel_size"] = ranks // config.parallel.model_parallel_size
    layout = layout_text({name: size for name, size in sizes.items() if size > 1})
    logger.info("starting %d rank%s%s%s", ranks, "s" * (ranks > 1), place, f" ({layout})" * bool(layout))


def _prepare_libraries(config: RunConfig, ranks: int, *, threads: int | None = None) -> None:
    """Set the environment variables of libraries, before torch is imported; log those that the user has set."""
    kept = devices.prepare_libraries(config.run_shape(ranks, threads=threads))
    if kept and not devices.launched_here():
        logger.info("kept from the environment: %s", ", ".join(kept))


def run_rank(file: Path, overrides: Sequence[str], address: devices.RankAddress) -> None:
    """Run a configuration as one of the ranks that a launcher has started.

    Each rank checks its address and the layout. Rank 0 checks the rest, unless our own launcher has done so.

    Raises:
        InputError: the configuration or a file has problems (see `find_start`); raised on every rank.
        CorruptError: token files or a checkpoint are damaged; raised on every rank.
    """
    is_launched_here = devices.launched_here()
    is_silent = address.rank != 0 or is_launched_here  # our launcher has reported moved fields already
    with run_log(address.rank) as log:
        config = load_config(file, overrides, report=(lambda _: None) if is_silent else print_on_stderr)
        if problems := [*config.parallel.problems(), *config.runtime.problems()]:
            raise InputError("\n".join(problems))
        config.parallel.resolve_data_parallel_size(address.world_size)
        log.write_to(config.logging.folder)
        if not is_launched_here:
            _log_start(config, address.world_size)
        threads = None
        if devices.sees_gpus() and not is_launched_here:  # on a CPU, torch sets the number of threads
            threads = config.runtime.threads_per_rank or devices.threads_per_rank(address.local_world_size)
        _prepare_libraries(config, address.world_size, threads=threads)
        from megatron_fanformer.runtime.agreement import on_main
        from megatron_fanformer.runtime.parallel import process_group, rank_grid

        with ExitStack() as locks, process_group(config.runtime, address) as device:

            def lock_and_find_start() -> RunStart | None:
                from_launcher = read_payload()
                if from_launcher is not None:
                    return cast(RunStart, from_launcher)
                locks.enter_context(run_lock(Path(config.training.run_dir)))
                return find_start(config, address.world_size, unless_complete=True)

            if (start := on_main(lock_and_find_start)) is None:
                return
            with rank_grid(config.parallel, device, config.runtime) as grid:
                _train(config, grid, start, log)


def _train(config: RunConfig, grid: "RankGrid", start: RunStart, log: RunLog) -> None:
    from megatron_fanformer.train.trainer import Trainer  # imports megatron-core, which is prepared by now

    trainer = Trainer(config, grid, start, log.console)
    failed = True
    try:
        trainer.train()
        failed = False
    except (DivergenceError, Interrupted) as error:
        failed = not isinstance(error, Interrupted)  # an interrupted run will be continued
        error.already_reported = not grid.is_main  # all ranks raise the error, and the main rank reports it
        raise
    finally:
        trainer.close(failed=failed)
