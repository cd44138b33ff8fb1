"""Measures what it costs to read a run's samples, what of it are the checks of what is read, and what the same samples
cost by megatron-core's own dataset.

    python tools/bench_samples.py [--documents 20000] [--document-tokens 500] [--seq-length 1024] [--step-ms 250]

The checks: each id against the vocabulary, pointers and sample indices against their sums. The same samples are read
with and without them, in turns; a time is the median of its turns, of the processor's seconds. Files are in the page
cache. `--step-ms` is the time of one micro batch of `--micro-batch-size` samples on the machine in question: what the
checks take of it is printed beside.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from benchmarking.turns import clocked, parser_of, print_results


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read."""

    documents: int = 20_000
    document_tokens: int = 500
    """On average."""
    seq_length: int = 1024
    samples: int = 2000
    micro_batch_size: int = 8
    step_ms: float = 0.0
    """Of a micro batch; 0: not known."""
    repeats: int = 9


@dataclass(frozen=True, kw_only=True)
class ReadingResult:
    """Reading with the checks, without them, or by megatron-core's dataset."""

    case: str
    microseconds: float
    """Of a sample, of the processor."""
    tokens_per_second: float
    """Of the processor's seconds."""
    share_of_step: float | None
    """Of what the checks add to a micro batch."""


def main() -> int:
    """Print a table, or one object per case."""
    options = vars(parser_of(__doc__.splitlines()[0], Reading()).parse_args())
    as_json = options.pop("json")
    asked = Reading(**options)
    heading = f"{'case':16} {'us a sample':>12} {'tokens/CPU s':>13} {'of a step':>10}"
    print_results(measure(asked), asked, heading=heading, line=_line, as_json=as_json)
    return 0


def _line(result: ReadingResult) -> str:
    share = "" if result.share_of_step is None else f"{result.share_of_step:10.3%}"
    return f"{result.case:16} {result.microseconds:12.1f} {result.tokens_per_second:13,.0f} {share}"


def measure(asked: Reading) -> Iterator[ReadingResult]:
    """With the checks, then without, then by megatron-core's."""
    from megatron_fanformer.data.config import DataConfig
    from megatron_fanformer.data.datasets import build_datasets

    with tempfile.TemporaryDirectory() as folder:
        prefix = _write_pair(Path(folder), asked)
        config = DataConfig(train_data=[prefix])
        sizes = {"seq_length": asked.seq_length, "train_samples": asked.samples, "valid_samples": 1}
        for _ in range(2):  # the first one writes the indices, the second reads them
            train = build_datasets(config, **sizes, seed=1, vocab_size=50_000, eod_id=0).train

        peer = _megatrons(prefix, asked)

        def read(dataset: Any) -> None:
            for number in range(asked.samples):
                dataset[number]

        read(train)
        read(peer)
        seconds: dict[str, list[float]] = {"checked": [], "unchecked": [], "megatron-core": []}
        for _ in range(asked.repeats):
            seconds["checked"].append(clocked(lambda: read(train)).processor_seconds)
            with _unchecked():
                seconds["unchecked"].append(clocked(lambda: read(train)).processor_seconds)
            seconds["megatron-core"].append(clocked(lambda: read(peer)).processor_seconds)
    times = {case: 1e6 * median(values) / asked.samples for case, values in seconds.items()}
    added = asked.micro_batch_size * (times["checked"] - times["unchecked"])
    for case, microseconds in times.items():
        share = added / (1e3 * asked.step_ms) if case == "checked" and asked.step_ms else None
        rate = 1e6 * asked.seq_length / microseconds
        yield ReadingResult(case=case, microseconds=microseconds, tokens_per_second=rate, share_of_step=share)


def _megatrons(prefix: str, asked: Reading) -> Any:
    """The same samples by megatron-core's own dataset, which maps the file."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=asked.seq_length,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=50_000, unique_identifiers={}),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [asked.samples, 0, 0], lambda: True, config).build()
    return train


@contextmanager
def _unchecked() -> Iterator[None]:
    """The readers as they are, without a look at what they have read."""
    from megatron_fanformer.data import live_files, token_files

    def read(self: live_files.SummedFile, count: int, offset: int) -> bytes:
        return self._file.read(count, self._first + offset)

    with (
        mock.patch.object(token_files, "refuse_ids_read", lambda *_, **__: None),
        mock.patch.object(live_files.SummedFile, "read", read),
    ):
        yield


def _write_pair(folder: Path, asked: Reading) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = np.random.default_rng(0)
    prefix = str(folder / "samples")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in draw.integers(1, 2 * asked.document_tokens, size=asked.documents):
        builder.add_document(draw.integers(50_000, size=length, dtype=np.int64), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return prefix


if __name__ == "__main__":
    sys.exit(main())
