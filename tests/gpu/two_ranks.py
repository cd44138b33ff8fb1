"""One of several ranks that share one GPU, which NCCL refuses: they talk over gloo, which copies through the host.

    python -m tests.gpu.two_ranks RANK RANKS CONFIG

Runs the trainer as every rank does; what differs is the process group and the GPU's number, which are this file's.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fanformer.runtime import device

GROUP_TIMEOUT = timedelta(minutes=2)


def main(rank: int, ranks: int, file: Path) -> None:
    """Train the configuration's run as that rank."""
    device.quieten_libraries()
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.training.config import load_config
    from megatron_fanformer.training.trainer import Trainer

    config = load_config(file)
    device.configure_process("cuda", 0, 1)  # the first GPU, whichever rank
    store = dist.FileStore(f"{file}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    with rank_grid(config.parallel, "cuda") as grid:
        trainer = Trainer(config, grid)
        try:
            trainer.train()
        finally:
            trainer.close()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
