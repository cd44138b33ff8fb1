"""Starts a run: checks it, then runs it in this process, launches local ranks, or joins the ranks it is given."""

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
    """Run a configuration on this machine, on as many local ranks as its layout asks for.

    Args:
        arguments: of this command, for the ranks to be started with.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    run = Path(config.training.run_dir)
    # The lock comes before its checkpoint is chosen: a run that is about to end may be saving another one.
    with run_log(rank=0) as started, run_lock(run):

        def begin() -> None:
            if (ranks := local_ranks(config)) == 1:
                started.write_to(config.logging.folder)
            _log_start(config, ranks, " on this machine")
            _prepare_libraries(config, ranks)

        start = find_start(config, None, unless_complete=True, before_torch=begin)
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
            _train(config, grid, start, started)


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
    kept = devices.prepare_libraries(config.run_shape(ranks, threads=threads))
    if kept and not devices.launched_here():
        logger.info("kept from the environment: %s", ", ".join(kept))


def run_rank(file: Path, overrides: Sequence[str], address: devices.RankAddress) -> None:
    """Run a configuration as one of the ranks that a launcher started.

    Each rank checks its address and layout; rank 0 checks the rest, unless our own launcher did.

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
        started.write_to(config.logging.folder)
        if not is_launched_here:
            _log_start(config, address.world_size)
        threads = None
        if devices.sees_gpus() and not is_launched_here:  # a CPU's ranks set theirs through torch
            threads = config.runtime.threads_per_rank or devices.threads_per_rank(address.local_world_size)
        _prepare_libraries(config, address.world_size, threads=threads)
        from megatron_fanformer.runtime.agreement import on_main
        from megatron_fanformer.runtime.parallel import process_group, rank_grid

        with ExitStack() as held, process_group(config.runtime, address) as kind:

            def find() -> RunStart | None:
                if (checked := read_payload()) is not None:
                    return cast(RunStart, checked)
                held.enter_context(run_lock(Path(config.training.run_dir)))
                return find_start(config, address.world_size, unless_complete=True)

            if (start := on_main(find)) is None:
                return
            with rank_grid(config.parallel, kind, config.runtime) as grid:
                _train(config, grid, start, started)


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
