"""Measures what the start of a run on terabytes of tokens takes of each rank of a node.

    python tools/bench_start.py [--files 2000] [--file-bytes 1000000000] [--ranks 8] [--tensor-ranks 1]

The `.npy` files are sparse: they have a size, and take no space. A tiny model starts on them twice and takes a step
each time: the first start stores the order of the samples, where it is stored at all, and the second finds it. Before,
it starts on one small file, for comparison. Ranks are forks of a process that has imported everything: seconds are the
processor's, without imports; memory is what the rank does not share, and begins at its fork. The process that stores an
order needs 4 bytes a sample meanwhile, and the cache as much of the disk.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarking.turns import parser_of, print_results

SMALL_BYTES = 1 << 20
JOB_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is started on."""

    files: int = 2000
    file_bytes: int = 10**9
    """Two a token."""
    seq_length: int = 2048
    ranks: int = 1
    tensor_ranks: int = 1
    """Of each tensor parallel group: 1, 2, 4 or 8."""


@dataclass(frozen=True, kw_only=True)
class StartResult:
    """A start, on one of its ranks."""

    case: str
    rank: int
    processor_seconds: float
    """Until the first step is taken."""
    private_mib: float
    """Memory that no other process has, after the step, beyond that at the fork."""
    proportional_mib: float
    """The rank's share of all memory that it uses, after the step."""
    reads: int
    """Of token files, in the step."""
    order_bytes: int
    """Of the stored order."""


def main() -> int:
    """Print a line for each rank of each start."""
    options = vars(parser_of(__doc__.splitlines()[0], Start()).parse_args())
    as_json = options.pop("json")
    asked = Start(**options)
    heading = f"{'case':12} rank {'CPU s':>7} {'private MiB':>12} {'PSS MiB':>8} {'reads':>6} {'order, bytes':>15}"
    print_results(measure(asked), asked, heading=heading, line=_line, as_json=as_json)
    return 0


def _line(result: StartResult) -> str:
    return (
        f"{result.case:12} {result.rank:4} {result.processor_seconds:7.1f} {result.private_mib:12.0f} "
        f"{result.proportional_mib:8.0f} {result.reads:6} {result.order_bytes:15,}"
    )


def measure(asked: Start) -> Iterator[StartResult]:
    """Start on a small file, and twice on all."""
    from megatron_fanformer.runtime.rank_pool import RankPool

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small", folder / "large"
        _write_sparse(small, 1, SMALL_BYTES)
        _write_sparse(large, asked.files, asked.file_bytes)
        for case, tokens in (("small file", small), ("first start", large), ("later start", large)):
            with RankPool(job_seconds=JOB_SECONDS) as pool:  # new ranks, whose memory begins with their fork
                found = pool.run(asked.ranks, started, asdict(asked), str(tokens), str(folder / "cache"))
            orders = (folder / "cache" / "orders").rglob("order.npy")
            stored = sum(file.stat().st_size for file in orders) if tokens is large else 0
            for rank, values in enumerate(found):
                yield StartResult(case=case, rank=rank, order_bytes=stored, **values)


def started(asked: dict[str, Any], tokens: str, cache: str) -> dict[str, float]:
    """On a rank: start, take a step, and return what it took."""
    from megatron_fanformer.data.npy_files import NpyFile
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.training.config import config_from_dict
    from megatron_fanformer.training.trainer import Trainer

    seconds, private = time.process_time(), _memory("Private_Clean", "Private_Dirty")
    counted = mock.patch.object(NpyFile, "read", autospec=True, side_effect=NpyFile.read)
    with tempfile.TemporaryDirectory() as run, counted as read:
        config = config_from_dict(_values(asked, tokens, cache, run))
        with rank_grid(config.parallel, "cpu") as grid:
            trainer = Trainer(config, grid)
            before = read.call_count
            trainer.take_step()
            found = {
                "processor_seconds": time.process_time() - seconds,
                "private_mib": _memory("Private_Clean", "Private_Dirty") - private,
                "proportional_mib": _memory("Pss"),
                "reads": read.call_count - before,
            }
            trainer.close()
    return found


def _values(asked: dict[str, Any], tokens: str, cache: str, run: str) -> dict[str, Any]:
    model = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "vocab_size": 100}
    batch = asked["ranks"] // asked["tensor_ranks"]
    return {
        "model": {**model, "seq_length": asked["seq_length"]},
        "parallel": {"tensor_model_parallel_size": asked["tensor_ranks"]},
        "kernels": {"transformer_impl": "local"},
        "runtime": {"device": "cpu", "threads_per_rank": 1, "cpu_kernels": "torch"},
        "precision": {"dtype": "fp32"},
        "data": {"train_data": [f"{tokens}/"], "cache_path": cache},
        "training": {"run_dir": run, "train_iters": 2, "global_batch_size": batch},
        "logging": {"tensorboard": False},
    }


def _memory(*kinds: str) -> float:
    """Return MiB of this process, of some kinds of /proc/PID/smaps_rollup together."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(parts[1]) for parts in lines if parts[0].rstrip(":") in kinds) / 1024


def _write_sparse(folder: Path, files: int, size: int) -> None:
    folder.mkdir()
    for number in range(files):
        with (folder / f"{number:05}.npy").open("wb") as file:
            os.truncate(file.fileno(), size)


if __name__ == "__main__":
    sys.exit(main())
