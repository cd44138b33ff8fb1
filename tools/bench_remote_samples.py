"""Measures how many tokens a second loader processes read from a store that answers each request late.

    python tools/bench_remote_samples.py [--latency-ms 50] [--workers 2] [--micro-batch-size 1] [--seq-length 2048]

The store is a server of HTTP in another process of this machine, which waits before each answer (needs the extra
`http`); the tokens are `.npy` files, or a pair of documents of `--document-tokens`. The rate is that of batches after
the first ones, which the loaders begin together.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking.turns import parser_of, print_results

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 50_000


@dataclass(frozen=True, kw_only=True)
class RemoteReading:
    """What is read, and how."""

    latency_ms: float = 50.0
    workers: int = 2
    micro_batch_size: int = 1
    seq_length: int = 2048
    document_tokens: int = 0
    """Of a document of a pair; 0: .npy files."""
    batches: int = 400


@dataclass(frozen=True, kw_only=True)
class RemoteReadingResult:
    """How fast it was."""

    tokens_per_second: float
    samples_per_second: float


def main() -> int:
    """Print a line."""
    options = vars(parser_of(__doc__.splitlines()[0], RemoteReading()).parse_args())
    as_json = options.pop("json")
    asked = RemoteReading(**options)
    print_results(
        iter([measure(asked)]),
        asked,
        heading=f"{'tokens a second':>16} {'samples a second':>17}",
        line=lambda result: f"{result.tokens_per_second:16,.0f} {result.samples_per_second:17,.1f}",
        as_json=as_json,
    )
    return 0


def measure(asked: RemoteReading) -> RemoteReadingResult:
    """Read batches through the run's own loaders."""
    from megatron_fanformer.data.batches import micro_batches
    from megatron_fanformer.data.config import DataConfig
    from megatron_fanformer.data.datasets import build_datasets

    with tempfile.TemporaryDirectory() as folder:
        names = _write(Path(folder), asked)
        with _server(Path(folder), asked.latency_ms / 1e3) as url:
            config = DataConfig(train_data=[f"{url}/{name}" for name in names], cache_path=f"{folder}/cache")
            sizes = {"seq_length": asked.seq_length, "train_samples": 100_000, "valid_samples": 1}
            train = build_datasets(config, **sizes, seed=1, vocab_size=VOCAB_SIZE, eod_id=0).train
            stated = {"data_parallel_rank": 0, "data_parallel_size": 1, "num_workers": asked.workers}
            batches = micro_batches(train, consumed_samples=0, micro_batch_size=asked.micro_batch_size, **stated)
            for _ in islice(batches, max(1, asked.batches // 4)):
                pass
            started = time.monotonic()
            for _ in islice(batches, asked.batches):
                pass
            seconds = time.monotonic() - started
            batches.close()
    samples = asked.batches * asked.micro_batch_size / seconds
    return RemoteReadingResult(tokens_per_second=samples * asked.seq_length, samples_per_second=samples)


def _write(folder: Path, asked: RemoteReading) -> list[str]:
    draw = np.random.default_rng(0)
    if not asked.document_tokens:
        for number in range(8):
            draw.integers(VOCAB_SIZE, size=1 << 20).astype("<u2").tofile(folder / f"{number}.npy")
        return [f"{number}.npy" for number in range(8)]
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "samples.bin"), dtype=np.uint16)
    for length in draw.integers(1, 2 * asked.document_tokens, size=(1 << 23) // asked.document_tokens):
        builder.add_document(draw.integers(VOCAB_SIZE, size=length), [int(length)])
    builder.finalize(str(folder / "samples.idx"))
    return ["samples"]


@contextmanager
def _server(folder: Path, latency_seconds: float) -> Iterator[str]:
    """The URL of a folder behind a server in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(folder, latency_seconds, there), daemon=True)
    server.start()
    yield here.recv()
    server.terminate()
    server.join()


def _serve(folder: Path, latency_seconds: float, connection: Any) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.data.failing_stores import http_server

    with http_server(folder, latency_seconds=latency_seconds) as url:
        connection.send(url)
        time.sleep(1e6)


if __name__ == "__main__":
    sys.exit(main())
