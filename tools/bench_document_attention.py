"""Measures attention within documents on a CPU: forward and backward of one row of tokens, by the documents' length.

    python tools/bench_document_attention.py [--tokens 4096] [--heads 8] [--dtype fp32] [--threads 2] [--json]

The row is cut into documents of equal length, from one document of all tokens (attention without document masking) to
short ones, each at least a token shorter or longer than its neighbours, so that none are computed together. The work
of the scores is the sum of the squares of the lengths. Lengths take turns, so that other load on the machine affects
all alike; a time is the least of its turns, of which the processor's seconds depend less on other processes.
"""

import sys
from dataclasses import dataclass
from typing import Any

from benchmarking.turns import Clocked, clocked, parser_of, print_results


@dataclass(frozen=True, kw_only=True)
class Row:
    """What attention is given: queries, keys and values of one row."""

    tokens: int = 4096
    heads: int = 8
    head_size: int = 64
    dtype: str = "fp32"
    threads: int = 2
    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class Result:
    """Forward and backward with documents of one length; ratios are to those of one document."""

    document_tokens: int
    """Mean length."""
    documents: int
    squares: int
    """The sum of the lengths' squares."""
    seconds: float
    processor_seconds: float
    """Of all threads."""
    squares_ratio: float
    time_ratio: float
    processor_ratio: float


def main() -> int:
    """Print a table, or one object per length."""
    options = vars(parser_of(__doc__.splitlines()[0], Row()).parse_args())
    as_json = options.pop("json")
    row = Row(**options)
    heading = f"{'tokens':>7} {'documents':>9} {'squares':>8} {'ms':>9} {'ratio':>7} {'CPU ms':>9} {'ratio':>7}"
    print_results(measure(row), row, heading=heading, line=_line, as_json=as_json)
    return 0


def _line(result: Result) -> str:
    return (
        f"{result.document_tokens:7} {result.documents:9} {result.squares_ratio:8.4f} {result.seconds * 1e3:9.1f} "
        f"{result.time_ratio:7.4f} {result.processor_seconds * 1e3:9.1f} {result.processor_ratio:7.4f}"
    )


def documents_of(tokens: int, mean: int) -> list[int]:
    """Lengths that add up to `tokens`, a token more and a token less than their mean in turns."""
    count = tokens // mean
    return [mean + (1 if number % 2 else -1) for number in range(count)] if count > 1 else [tokens]


def measure(row: Row) -> list[Result]:
    """From one document on, lengths halved down to 32 tokens."""
    from megatron_fanformer.runtime import device, megatron_cpu

    device.quieten_libraries()
    device.hide_gpus()
    megatron_cpu.install()
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fanformer.model.dtypes import DTYPES
    from megatron_fanformer.model.local_layers import TorchCoreAttention
    from megatron_fanformer.ops import cpu_kernels
    from megatron_fanformer.runtime.pipeline import packed_documents

    torch.set_num_threads(row.threads)
    device.keep_freed_memory()
    if problem := cpu_kernels.load(device.cache_folder()):
        print(f"by PyTorch's operations: {problem}", file=sys.stderr)
    config = TransformerConfig(
        num_layers=1, hidden_size=row.heads * row.head_size, num_attention_heads=row.heads, attention_dropout=0.0
    )
    attention = TorchCoreAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(0)
    shape = (row.tokens, row.heads, row.head_size)
    qkv = [torch.randn(shape, generator=generator).to(DTYPES[row.dtype]).requires_grad_() for _ in range(3)]
    grad = torch.randn(row.tokens, row.heads * row.head_size, generator=generator).to(DTYPES[row.dtype])
    cuts = []
    while (mean := row.tokens >> len(cuts)) >= min(32, row.tokens):
        cuts.append(documents_of(row.tokens, mean))
    least = [Clocked(float("inf"), float("inf"))] * len(cuts)
    for _ in range(row.repeats + 1):  # the first warms up
        for number, lengths in enumerate(cuts):
            ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
            packed = packed_documents(ids, "cpu")

            def turn(packed: Any = packed) -> None:
                torch.autograd.grad(attention(*qkv, packed_seq_params=packed), qkv, grad)

            least[number] = Clocked(*map(min, least[number], clocked(turn)))
    return [
        Result(
            document_tokens=row.tokens // len(lengths),
            documents=len(lengths),
            squares=(squares := sum(length**2 for length in lengths)),
            **best._asdict(),
            squares_ratio=squares / row.tokens**2,
            time_ratio=best.seconds / least[0].seconds,
            processor_ratio=best.processor_seconds / least[0].processor_seconds,
        )
        for lengths, best in zip(cuts, least, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
