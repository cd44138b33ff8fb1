"""Measure the start of a run on terabytes of tokens, on each rank of a node.

    python tools/bench_start.py [--files 2000] [--file-bytes 1000000000] [--ranks 8] [--tensor-ranks 1]

The `.npy` files are sparse: they have a size, and take no space. A tiny model starts on one small file, for comparison,
and twice on all files, and takes a step each time: the first start stores the order of the samples, where it is stored
at all, and the later one reads it. Ranks are forks of a process that has imported everything: seconds are the
processor's, without imports; memory is private to the rank, beyond that at its fork.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL_BYTES = 1 << 20
JOB_SECONDS = 3600.0


def main() -> int:
    """Print an object for each rank of each start."""
    from megatron_fanformer.runtime.rank_pool import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000, metavar="N", help="(2000)")
    parser.add_argument("--file-bytes", type=int, default=10**9, metavar="N", help="two a token (1000000000)")
    parser.add_argument("--seq-length", type=int, default=2048, metavar="N", help="(2048)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="(1)")
    parser.add_argument("--tensor-ranks", type=int, default=1, metavar="N", help="of each tensor parallel group (1)")
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small", folder / "large"
        _write_sparse(small, 1, SMALL_BYTES)
        _write_sparse(large, options["files"], options["file_bytes"])
        for case, tokens in (("small file", small), ("first start", large), ("later start", large)):
            with RankPool(job_seconds=JOB_SECONDS) as pool:  # new ranks, whose memory begins with their fork
                measured = pool.run(options["ranks"], start, options, str(tokens), str(folder / "cache"))
            for rank, values in enumerate(measured):
                print(json.dumps({"case": case, "rank": rank, **values}), flush=True)
    return 0


def start(options: dict[str, Any], tokens: str, cache: str) -> dict[str, float]:
    """Start on a rank, and take a step; return its seconds and memory."""
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.train.config import config_from_dict
    from megatron_fanformer.train.trainer import Trainer

    seconds, private = time.process_time(), _private_mib()
    with tempfile.TemporaryDirectory() as run:
        config = config_from_dict(_values(options, tokens, cache, run))
        with rank_grid(config.parallel, "cpu") as grid:
            trainer = Trainer(config, grid)
            trainer.take_step()
            measured = {
                "processor_seconds": time.process_time() - seconds,
                "private_mib": _private_mib() - private,
            }
            trainer.close()
    return measured


def _values(options: dict[str, Any], tokens: str, cache: str, run: str) -> dict[str, Any]:
    model = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "vocab_size": 100}
    batch = options["ranks"] // options["tensor_ranks"]
    return {
        "model": {**model, "seq_length": options["seq_length"]},
        "parallel": {"tensor_model_parallel_size": options["tensor_ranks"]},
        "kernels": {"transformer_impl": "local"},
        "runtime": {"device": "cpu", "threads_per_rank": 1, "cpu_kernels": "torch"},
        "precision": {"dtype": "fp32"},
        "data": {"train_data": [f"{tokens}/"], "cache_path": cache},
        "training": {"run_dir": run, "train_iters": 2, "global_batch_size": batch},
        "logging": {"tensorboard": False},
    }


def _private_mib() -> float:
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(parts[1]) for parts in lines if parts[0].startswith("Private_")) / 1024


def _write_sparse(folder: Path, files: int, size: int) -> None:
    folder.mkdir()
    for number in range(files):
        with (folder / f"{number:05}.npy").open("wb") as file:
            os.truncate(file.fileno(), size)


if __name__ == "__main__":
    sys.exit(main())
