"""Measures what the checks of a checkpoint cost: its sums and the look for numbers that are not finite.

    python tools/bench_checkpoint.py [--hidden-size 768] [--num-layers 12] [--repeats 5] [--json]

Saves and loads with and without them take turns, so that other load on the machine affects both alike; a time is the
median of its turns. One rank, on the CPU; files are in the machine's cache when they are loaded, so that the shares
printed are the largest that they can be: reading from a disk takes longer, the sums do not.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one operation, with the checks and without them."""

    operation: str
    bytes: int
    """Of the checkpoint."""
    checked: float
    unchecked: float

    @property
    def share(self) -> float:
        """What the checks add."""
        return self.checked / self.unchecked - 1


def main() -> None:
    """Print a table, or one object per operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden-size", 768), ("num-layers", 12), ("vocab-size", 50304), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="one JSON object per operation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(configuration(options, Path(folder)), options.repeats)
    if options.json:
        for cost in costs:
            print(json.dumps({**asdict(cost), "share": cost.share}))
        return
    print(f"{'':8} {'bytes':>14} {'seconds':>9} {'without':>9} {'added':>7}")
    for cost in costs:
        print(f"{cost.operation:8} {cost.bytes:>14,} {cost.checked:>9.3f} {cost.unchecked:>9.3f} {cost.share:>7.1%}")


def configuration(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run of that model, on a few random tokens, as plain values."""
    tokens = folder / "tokens.npy"
    np.random.default_rng(0).integers(options.vocab_size, size=4096).astype(np.uint16).tofile(tokens)
    return {
        "model": {
            "num_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "ffn_hidden_size": 4 * options.hidden_size,
            "num_attention_heads": options.hidden_size // 64 or 1,
            "vocab_size": options.vocab_size,
            "seq_length": 64,
        },
        "kernels": {"transformer_impl": "local"},
        "runtime": {"device": "cpu"},
        "precision": {"dtype": "fp32"},
        "data": {"train_data": [str(tokens)]},
        "training": {"run_dir": str(folder / "run"), "train_iters": 2, "global_batch_size": 1},
        "logging": {"tensorboard": False},
    }


def measure(values: dict[str, Any], repeats: int) -> list[Cost]:
    """Save and load a run's state in turns."""
    from megatron_fanformer.runtime import device, megatron_cpu

    device.quieten_libraries()
    megatron_cpu.install()
    from megatron_fanformer.checkpoint import store
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.training.config import config_from_dict
    from megatron_fanformer.training.trainer import Trainer

    config = config_from_dict(values)
    run = Path(config.training.run_dir)
    with distributed(config.parallel, None, config.runtime) as grid:
        trainer = Trainer(config, grid)
        trainer.take_step()

        def save() -> None:
            shutil.rmtree(run / store.CHECKPOINTS, ignore_errors=True)
            trainer._save_if_due(force=True)

        def load() -> None:
            trainer._load_checkpoint(run / store.CHECKPOINTS / store.checkpoint_name(1))

        saving = in_turns(save, repeats)
        save()
        size = sum(file.stat().st_size for file in (run / store.CHECKPOINTS / store.checkpoint_name(1)).iterdir())
        loading = in_turns(load, repeats)
        trainer.close()
    return [
        Cost(operation="save", bytes=size, checked=saving[0], unchecked=saving[1]),
        Cost(operation="load", bytes=size, checked=loading[0], unchecked=loading[1]),
    ]


def in_turns(operation: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median seconds with the checks and without them."""
    operation()  # not measured: the first one fills caches
    checked, unchecked = [], []
    for _ in range(repeats):
        checked.append(timed(operation))
        with without_checks():
            unchecked.append(timed(operation))
    return median(checked), median(unchecked)


def timed(operation: Callable[[], None]) -> float:
    """Its seconds."""
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


@contextmanager
def without_checks() -> Iterator[None]:
    """Save and load as if there were none."""
    package = "megatron_fanformer.checkpoint"
    checks = ("saving.check_finite", "saving.write_rank_sums", "store.write_manifest", "stored_files.check_stored")
    with ExitStack() as stack:
        for check in checks:
            stack.enter_context(mock.patch(f"{package}.{check}"))
        yield


if __name__ == "__main__":
    main()
