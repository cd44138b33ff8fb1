"""Starts a run: checks it, then runs it in this process, launches local ranks, or joins the ranks it is given.

Ranks that were launched here are started again after a failure, as often as `training.max_restarts` allows.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.errors import DivergenceError, FanformerError, InputError, Interrupted
from megatron_fanformer.model.layouts import layout_text
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime import environment
from megatron_fanformer.runtime.launch import RankFailed, launch_ranks, read_payload, refuse_ranks_without_gpu
from megatron_fanformer.train.config import RunConfig, load_config, print_on_stderr
from megatron_fanformer.train.preflight import RunStart, find_start
from megatron_fanformer.train.run_log import FILE_ONLY, RunLog, log_file, run_log

if TYPE_CHECKING:
    from megatron_fanformer.runtime.parallel import RankGrid

DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
LONGEST_PAUSE_SECONDS = 60  # before a restart; the first one follows after a second, each further one after twice that

logger = logging.getLogger(__name__)


def start_run(file: Path, overrides: Sequence[str], arguments: Sequence[str], log: Path | None = None) -> Path | None:
    """Run a configuration on this machine, on as many local ranks as its layout asks for.

    Args:
        arguments: of this command, for the ranks to be started with.
        log: the log file, if the command names one.

    Returns:
        The run's folder; None, with a log line, if the run was complete before.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    run = Path(config.training.run_dir)
    # The lock comes before its checkpoint is chosen: a run that is about to end may be saving another one.
    locked = run_lock(run)
    with run_log(rank=0) as started, locked:

        def begin() -> None:
            ranks = local_ranks(config)
            _log_start(config, ranks, " on this machine")
            _prepare_libraries(config, ranks)

        start = find_start(config, None, unless_complete=True, before_torch=begin)
        if start is None:
            return None
        ranks = local_ranks(config)
        refuse_ranks_without_gpu(
            ranks,
            config.runtime,
            origin="the layout",
            remedy="change parallel, start on several nodes with torchrun, or let ranks share a GPU with "
            "runtime.distributed_backend gloo",
        )
        if ranks > 1 or config.training.max_restarts > 0:  # the process that restarts a rank must survive it
            _launch(config, ranks, arguments, start)
            return run
        started.write_to(log_file(config.logging, log, rank=0, world_size=1))
        from megatron_fanformer.runtime.parallel import distributed

        with distributed(config.parallel, None, config.runtime) as grid:
            _train(config, grid, start, started)
    return run


def local_ranks(config: RunConfig) -> int:
    """Return the ranks that a run has on this machine alone."""
    return config.parallel.resolve_data_parallel_size(None) * config.parallel.model_parallel_size


def _log_start(config: RunConfig, ranks: int, place: str = "") -> None:
    """Log the first sign of life, before torch is imported."""
    sizes = {name: getattr(config.parallel, name) for name in DEGREES}
    sizes["data_parallel_size"] = ranks // config.parallel.model_parallel_size
    layout = layout_text({name: size for name, size in sizes.items() if size > 1})
    logger.info("starting %d rank%s%s%s", ranks, "s" * (ranks > 1), place, f" ({layout})" * bool(layout))


def _prepare_libraries(config: RunConfig, ranks: int, *, threads: int | None = None) -> None:
    """Set the environment of libraries, before torch is imported; log the values that the user has set."""
    settings = devices.prepare_libraries(config.run_shape(ranks, threads=threads))
    if (line := environment.kept_line(settings)) and not devices.launched_here():
        logger.info("%s", line)


def _launch(config: RunConfig, ranks: int, arguments: Sequence[str], start: RunStart) -> None:
    """Launch local ranks, and launch them again after a crash, as often as `training.max_restarts` allows."""
    threads = config.runtime.threads_per_rank or devices.threads_per_rank(ranks)
    restarts, reason = 0, None
    while True:
        try:
            launch_ranks(ranks, arguments, threads=threads, payload=(start, reason))
            return
        except RankFailed as failure:
            is_crash = failure.exit_code == FanformerError.exit_code and not failure.was_stopping
            if config.training.max_restarts == 0 or not is_crash:
                raise
            resumed, next_start = start.resumed, find_start(config, None, unless_complete=True)
            if next_start is None:
                return  # after the last save
            start = next_start
            restarts = 1 if start.resumed != resumed else restarts + 1
            if restarts > config.training.max_restarts:
                logger.warning("no new checkpoint in %d restarts; training.max_restarts allows no more", restarts - 1)
                raise
            pause = min(2 ** (restarts - 1), LONGEST_PAUSE_SECONDS)
            reason = f"restart {restarts} of {config.training.max_restarts}: {failure}"
            logger.warning("%s; from %s in %d s", reason, start.resumed or "the beginning", pause)
            time.sleep(pause)


def run_rank(
    file: Path, overrides: Sequence[str], address: devices.RankAddress, log: Path | None = None
) -> Path | None:
    """Run a configuration as one of the ranks that a launcher started.

    Each rank checks its address and layout; rank 0 checks the rest, unless our own launcher did.

    Args:
        log: the log file, if the command names one.

    Returns:
        As `start_run`, on rank 0; on others, and where our own launcher returns it, None.

    Raises:
        InputError, CorruptError: those of `find_start`, on every rank.
    """
    is_launched_here = devices.launched_here()
    quiet = address.rank != 0 or is_launched_here
    with run_log(address.rank) as started:
        config = load_config(file, overrides, report=(lambda _: None) if quiet else print_on_stderr)  # reported already
        if problems := [*config.parallel.problems(), *config.runtime.problems()]:
            raise InputError("\n".join(problems))
        config.parallel.resolve_data_parallel_size(address.world_size)
        if not is_launched_here:
            _log_start(config, address.world_size)
        threads = None
        if devices.sees_gpus() and not is_launched_here:  # a CPU's ranks set theirs through torch
            threads = config.runtime.threads_per_rank or devices.threads_per_rank(address.local_world_size)
        _prepare_libraries(config, address.world_size, threads=threads)
        from megatron_fanformer.runtime.agreement import on_main
        from megatron_fanformer.runtime.parallel import process_group, rank_grid

        started.write_to(log_file(config.logging, log, rank=address.rank, world_size=address.world_size))
        run = Path(config.training.run_dir)
        with ExitStack() as held, process_group(config.runtime, address) as kind:

            def find() -> tuple[RunStart | None, str | None]:
                if (of_launcher := read_payload()) is not None:
                    return cast(tuple[RunStart, str | None], of_launcher)
                held.enter_context(run_lock(run))
                return find_start(config, address.world_size, unless_complete=True), None

            start, reason = on_main(find)
            if start is None:
                return None
            if reason:
                logger.info("%s", reason, extra=FILE_ONLY)  # the launcher prints it
            with rank_grid(config.parallel, kind, config.runtime) as grid:
                _train(config, grid, start, started)
    return None if quiet else run


def _train(config: RunConfig, grid: "RankGrid", start: RunStart, log: RunLog) -> None:
    from megatron_fanformer.train.trainer import Trainer  # after megatron-core was prepared

    trainer = Trainer(config, grid, start, log.console)
    failed = True
    try:
        trainer.train()
        failed = False
    except (DivergenceError, Interrupted) as error:
        failed = not isinstance(error, Interrupted)  # which is to go on
        error.already_reported = not grid.is_main  # all raise it, and the main rank, with logs to close, reports it
        raise
    finally:
        trainer.close(failed=failed)
