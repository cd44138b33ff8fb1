"""Measures a checkpoint that is written in the background: how long training stands, and the memory of the host.

    python tools/bench_async_save.py --preset fanformer-1b --micro-batch-size 4 --json save.json

One run on random tokens, one rank. `stall_seconds` is the call that captures the state; `slowed_seconds` what the steps
take longer until the checkpoint is published. The same call and the waiting for its writer right after it is a
synchronous save, `synchronous_seconds`. `host_bytes` is how much more of the machine's memory was in use meanwhile (let
nothing else run there; a file cache does not count), `pinned_bytes` what torch had pinned.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarking.ranks import Rank, run_values, write_tokens

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.runtime import device as devices

WARM_UP = 3
PLAIN_STEPS = 6
SAMPLE_SECONDS = 0.2


def main() -> int:
    """Measure, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="fanformer-1b", metavar="NAME", help="(fanformer-1b)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use the model of a run's configuration")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seq-length", type=int, default=2048, metavar="N", help="(2048)")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    devices.prepare_libraries()
    device = devices.resolve_device(options.device)
    devices.prepare_megatron(on_cpu=device == "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-async-save-") as folder:
        measured = measure(configuration(options, device, Path(folder)))
    write_atomically(options.json, json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured, indent=1))
    return 0


def configuration(options: argparse.Namespace, device: devices.DeviceKind, folder: Path) -> dict[str, Any]:
    """The run, as plain values."""
    from megatron_fanformer.training.config import load_config

    model = load_config(options.config).model if options.config else PRESETS[options.preset]
    values = run_values(
        model,
        "bf16" if device == "cuda" else "fp32",
        write_tokens(folder / "tokens", model.vocab_size, 100 * options.seq_length),
        folder / "run",
        device=device,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=options.micro_batch_size,
    )
    values["model"]["seq_length"] = options.seq_length
    return values | {"checkpoint": {"async_save": True, "keep": 1}}


def measure(values: dict[str, Any]) -> dict[str, Any]:
    """Save in the background, and then with nothing beside it."""
    from megatron_fanformer.checkpoint import store
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.training.config import config_from_dict

    config = config_from_dict(values)
    checkpoints = Path(config.training.run_dir) / store.CHECKPOINTS
    with distributed(config.parallel, None, config.runtime) as grid:
        rank = Rank(config, grid)
        trainer = rank.trainer
        rank.steps(WARM_UP)
        trainer._save_if_due(force=True)  # the first one prepares what all need
        trainer._saves.publish_if_written(trainer.step, blocking=True)
        shutil.rmtree(checkpoints)
        plain = statistics.median(rank.steps(1).seconds for _ in range(PLAIN_STEPS))
        with host_memory() as memory:
            started = time.perf_counter()
            trainer._save_if_due(force=True)
            stall = time.perf_counter() - started
            beside = []
            while trainer._saves._saver._unpublished is not None:
                beside.append(rank.steps(1).seconds)
            writing = time.perf_counter() - started
        [checkpoint] = store.complete_checkpoints(Path(config.training.run_dir))
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        started = time.perf_counter()
        trainer._save_if_due(force=True)
        trainer._saves.publish_if_written(trainer.step, blocking=True)
        synchronous = time.perf_counter() - started
        trainer.close()
    return {
        "parameters": config.model.num_parameters,
        "checkpoint_bytes": size,
        "step_seconds": plain,
        "stall_seconds": stall,
        "slowed_seconds": sum(beside) - plain * len(beside),
        "writing_seconds": writing,
        "synchronous_seconds": synchronous,
        "host_bytes": max(memory) - memory[0],
        "pinned_bytes": pinned_bytes(),
    }


@contextmanager
def host_memory() -> Iterator[list[int]]:
    """Bytes of the machine's memory in use, again and again; the first before the block.

    Not of the processes: to count the pages that a fork shares once, the kernel walks through all of them.
    """
    samples = [_in_use()]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            samples.append(_in_use())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _in_use() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def pinned_bytes() -> int | None:
    """The most that torch has had of pinned memory; None where it does not count it."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    try:
        return torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    except (AssertionError, RuntimeError):  # a torch without CUDA
        return None


if __name__ == "__main__":
    sys.exit(main())
