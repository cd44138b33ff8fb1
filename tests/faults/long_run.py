"""A long run of tiny steps, with evaluations and asynchronous saves: what it holds of the machine must not grow.

python -m tests.faults.long_run --steps 20000
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_fanformer.runtime import device, megatron_cpu
from tests.small_runs import small_run, write_tokens

SAMPLES = 20
GROWTH = 0.03  # of the resident memory
CHUNK_STEPS = 50


class Held(NamedTuple):
    """What this process holds of the machine."""

    step: int
    resident_bytes: int
    descriptors: int
    threads: int
    """Python's and all others."""


def held(step: int) -> Held:
    """At this moment."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        step,
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        max(threading.active_count(), len(os.listdir("/proc/self/task"))),
    )


def run(steps: int, folder: Path) -> list[Held]:
    """Train, and look now and then, each time just before a save."""
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.training.config import config_from_dict
    from megatron_fanformer.training.trainer import Trainer

    tokens = write_tokens(folder / "tokens")
    values = small_run(
        tokens,
        folder / "run",
        data={"train_data": [tokens], "valid_data": {"held-out": [tokens]}},
        training={"train_iters": steps, "eval_interval": 2 * CHUNK_STEPS, "eval_iters": 1},
        checkpoint={"save_interval": CHUNK_STEPS, "keep": 2, "async_save": True},
        logging={"tensorboard": True, "log_interval": steps},
    )
    config = config_from_dict(values)
    every = max(CHUNK_STEPS, steps // SAMPLES // CHUNK_STEPS * CHUNK_STEPS)
    seen = []
    with distributed(config.parallel, None, config.runtime) as grid:
        trainer = Trainer(config, grid)
        take_step = trainer.take_step

        def looked_at() -> object:
            if trainer.step % every == CHUNK_STEPS - 1:  # the writer of the last save has ended
                seen.append(held(trainer.step))
            return take_step()

        trainer.take_step = looked_at  # type: ignore[method-assign,assignment]
        trainer.train()
        trainer.close()
    return seen


def growth(seen: list[Held]) -> list[str]:
    """What is never as low in the last quarter as it was in the second one, in words; what comes and goes passes."""
    quarter = len(seen) // 4
    early, late = seen[quarter : 2 * quarter], seen[-quarter:]
    found = []
    most, least = max(sample.resident_bytes for sample in early), min(sample.resident_bytes for sample in late)
    if least > (1 + GROWTH) * most:
        found.append(f"resident memory from {most:,} to {least:,} bytes")
    for name in ("descriptors", "threads"):
        before, after = max(getattr(sample, name) for sample in early), min(getattr(sample, name) for sample in late)
        if after > before:
            found.append(f"{name} from {before} to {after}")
    return found


def main() -> int:
    """The command line; 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    device.hide_gpus()
    device.quieten_libraries()
    megatron_cpu.install()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seen = run(options.steps, Path(folder))
    for sample in seen:
        print(f"step {sample.step:>6}  {sample.resident_bytes:>13,} bytes  {sample.descriptors} descriptors  ", end="")
        print(f"{sample.threads} threads")
    if found := growth(seen):
        print(f"grew: {'; '.join(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
