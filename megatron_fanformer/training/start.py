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
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import RunConfig, load_config, tell_on_stderr
from megatron_fanformer.training.preflight import RunStart, check_run
from megatron_fanformer.training.run_log import FILE_ONLY, RunLog, log_file, run_log

if TYPE_CHECKING:
    from megatron_fanformer.runtime.parallel import RankGrid

LONGEST_PAUSE_SECONDS = 60  # before a restart; the first one follows after a second, each further one after twice that

logger = logging.getLogger(__name__)


def start_run(file: Path, overrides: Sequence[str], arguments: Sequence[str], log: Path | None = None) -> None:
    """Run a configuration on this machine, on as many local ranks as its layout asks for.

    Args:
        arguments: this command's own, for the ranks to be started with.
        log: the log file, if the command names one.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    # The lock comes before its checkpoint is chosen: a run that is about to end may be saving another one.
    locked = run_lock(Path(config.training.run_dir))
    with run_log(rank=0) as started, locked:
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
        if ranks > 1 or config.training.max_restarts > 0:  # what restarts a rank must survive it
            _launch(config, ranks, arguments, start)
            return
        started.write_to(log_file(config.logging, log, rank=0, world_size=1))
        from megatron_fanformer.runtime.parallel import distributed

        with distributed(config.parallel, None, config.runtime) as grid:
            _train(config, grid, start, started)


def _launch(config: RunConfig, ranks: int, arguments: Sequence[str], start: RunStart) -> None:
    """Launch local ranks, and launch them again after a crash, as often as `training.max_restarts` allows."""
    from megatron_fanformer.runtime.launch import RankFailed, launch_ranks

    threads = config.runtime.threads_per_rank or devices.threads_per_rank(ranks)
    restarts, reason = 0, None
    while True:
        try:
            launch_ranks(ranks, arguments, threads=threads, found=(start, reason))
            return
        except RankFailed as failure:
            is_crash = failure.exit_code == FanformerError.exit_code and not failure.was_stopping
            if config.training.max_restarts == 0 or not is_crash:
                raise
            before, start = start, check_run(config, None)
            restarts = 1 if start.resumed != before.resumed else restarts + 1
            if restarts > config.training.max_restarts:
                logger.warning("no new checkpoint in %d restarts; training.max_restarts allows no more", restarts - 1)
                raise
            pause = min(2 ** (restarts - 1), LONGEST_PAUSE_SECONDS)
            reason = f"restart {restarts} of {config.training.max_restarts}: {failure}"
            logger.warning("%s; from %s in %d s", reason, start.resumed or "the beginning", pause)
            time.sleep(pause)


def run_rank(file: Path, overrides: Sequence[str], address: devices.RankAddress, log: Path | None = None) -> None:
    """Run a configuration as one of the ranks that a launcher started.

    Each rank checks what it needs to join the others; all else is checked by rank 0, or was by our own launcher.

    Args:
        log: the log file, if the command names one.

    Raises:
        InputError, CorruptError: like `check_run`, on every rank.
    """
    quiet = address.rank != 0 or devices.launched_here()
    tell = _tell_nothing if quiet else tell_on_stderr  # reported already
    with run_log(address.rank) as started:
        config = load_config(file, overrides, tell=tell)
        if found := [*config.parallel.problems(), *config.runtime.problems()]:
            raise InputError("\n".join(found))
        config.parallel.resolve_data_parallel_size(address.world_size)
        from megatron_fanformer.runtime.agreement import on_main
        from megatron_fanformer.runtime.launch import read_found
        from megatron_fanformer.runtime.parallel import process_group, rank_grid

        started.write_to(log_file(config.logging, log, rank=address.rank, world_size=address.world_size))
        with ExitStack() as held, process_group(config.runtime, address) as kind:

            def find() -> tuple[RunStart, str | None]:
                if (found := read_found()) is not None:
                    return cast(tuple[RunStart, str | None], found)
                held.enter_context(run_lock(Path(config.training.run_dir)))
                return check_run(config, address.world_size), None

            start, reason = on_main(find)
            if reason:
                logger.info("%s", reason, extra=FILE_ONLY)  # the launcher prints it
            with rank_grid(config.parallel, kind, config.runtime) as grid:
                _train(config, grid, start, started)


def _train(config: RunConfig, grid: "RankGrid", start: RunStart, log: RunLog) -> None:
    from megatron_fanformer.training.trainer import Trainer  # after megatron-core was prepared

    trainer = Trainer(config, grid, start, log.console)
    failed = True
    try:
        trainer.train()
        failed = False
    except Interrupted:
        failed = False  # it is to go on
        raise
    finally:
        trainer.close(failed=failed)


def _tell_nothing(_notice: str) -> None:
    """For ranks whose launcher, or first rank, has reported it."""
