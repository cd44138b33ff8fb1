"""Starts a run: checks it, then runs it in this process, launches local ranks, or joins the ranks it is given."""

from collections.abc import Sequence
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import RunConfig, load_config, tell_on_stderr
from megatron_fanformer.training.preflight import check_run


def start_run(file: Path, overrides: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a configuration on this machine, on as many local ranks as its layout asks for.

    Args:
        arguments: this command's own, for the ranks to be started with.

    Raises:
        InputError: the configuration is wrong; nothing was written.
    """
    config = load_config(file, overrides)
    ranks = check_run(config, None) * config.parallel.model_parallel_size
    import torch  # after what is wrong was told

    kind = devices.resolve_device(config.runtime.device)
    if kind == "cuda" and ranks > torch.cuda.device_count():
        raise InputError(
            f"the layout asks for {ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs; change "
            "parallel, or start over several nodes with torchrun"
        )
    if ranks == 1:
        _train(config, None)
    else:
        from megatron_fanformer.runtime.launch import launch_ranks

        launch_ranks(ranks, arguments, threads=config.runtime.threads_per_rank or devices.threads_per_rank(ranks))


def run_rank(file: Path, overrides: Sequence[str], address: devices.RankAddress) -> None:
    """Run a configuration as one of the ranks that a launcher started."""
    tell = tell_on_stderr if address.rank == 0 and not devices.launched_here() else _tell_nothing  # told already
    config = load_config(file, overrides, tell=tell)
    check_run(config, address.world_size)
    _train(config, address)


def _train(config: RunConfig, address: devices.RankAddress | None) -> None:
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()  # before the first import of megatron-core
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.training.trainer import Trainer

    with distributed(config.parallel, address, config.runtime) as grid:
        trainer = Trainer(config, grid)
        try:
            trainer.train()
        finally:
            trainer.close()


def _tell_nothing(_notice: str) -> None:
    """For ranks whose launcher, or whose first rank, has told it."""
