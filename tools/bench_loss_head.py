"""Measures the chunked loss head against Megatron's plain one: time and peak memory of forward and backward.

    python tools/bench_loss_head.py [--dtype fp32] [--tokens 2048] [--chunk-tokens 128 1024] [--device cpu] [--json]

Heads take turns, so that other load on the machine affects all alike; a time is the median of its turns, and on a CPU
seconds of the processor are printed beside it, which depend less on other processes. Peak memory is the most that was
held during a turn, less what was held before: resident on a CPU, allocated on a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarking.turns import Clocked, clocked, parser_of, print_results

Backend = Literal["nccl", "gloo"]
PLAIN = "plain"
RESET_PEAK = "5"  # what /proc/self/clear_refs expects for it


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """What the heads are given; the defaults are the shape of the goals for CPUs."""

    tokens: int = 2048
    hidden_size: int = 512
    vocab_size: int = 50304
    dtype: str = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2
    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """One head's forward and backward; ratios are to the plain head's."""

    case: str
    chunk_tokens: int
    seconds: float
    processor_seconds: float
    """Of all threads; on a GPU the host's."""
    peak_memory_bytes: int
    time_ratio: float
    processor_ratio: float
    memory_ratio: float
    logits_bytes: int
    """Of all tokens, in float32: what the plain head keeps at least."""


def main() -> int:
    """Print a table, or one object per case."""
    parser = parser_of(__doc__.splitlines()[0], HeadSize())
    parser.add_argument("--chunk-tokens", type=int, nargs="*", default=[], help="besides the default")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="as runs use it (by the device)")
    options = vars(parser.parse_args())
    chunk_tokens, as_json = options.pop("chunk_tokens"), options.pop("json")
    backend = options.pop("distributed_backend")
    size = HeadSize(**options)
    heading = f"{'head':14} {'tokens':>7} {'ms':>9} {'ratio':>6} {'CPU ms':>9} {'ratio':>6} {'peak MB':>9} {'ratio':>6}"
    results = measure(size, [None, *chunk_tokens], backend)
    print_results(results, size, heading=heading, line=_line, as_json=as_json)
    return 0


def _line(result: HeadResult) -> str:
    return (
        f"{result.case:14} {result.chunk_tokens:7} {result.seconds * 1e3:9.1f} {result.time_ratio:6.3f} "
        f"{result.processor_seconds * 1e3:9.1f} {result.processor_ratio:6.3f} "
        f"{result.peak_memory_bytes / 1e6:9.1f} {result.memory_ratio:6.3f}"
    )


def measure(size: HeadSize, chunk_tokens: list[int | None], backend: Backend | None = None) -> Iterator[HeadResult]:
    """The plain head, then the chunked one with each number of tokens (None: the default)."""
    with _started(size, backend) as grid:
        from megatron_fanformer.runtime.seeding import seed_everything  # after megatron-core was prepared

        seed_everything(0)
        turns = {PLAIN: _turn(size, grid, None)}
        turns |= {f"chunked {number or ''}".strip(): _turn(size, grid, number or 0) for number in chunk_tokens}
        peaks = {case: _peak_bytes(turn, grid) for case, (turn, _) in turns.items()}  # the first, to warm up as well
        taken: dict[str, list[Clocked]] = {case: [] for case in turns}
        for _ in range(size.repeats):
            for case, (turn, _) in turns.items():
                taken[case].append(clocked(turn, lambda: _wait(grid)))
    medians = {case: Clocked(*map(median, zip(*each, strict=True))) for case, each in taken.items()}
    for case, (_, chunk) in turns.items():
        yield HeadResult(
            case=case,
            chunk_tokens=chunk,
            **medians[case]._asdict(),
            peak_memory_bytes=peaks[case],
            time_ratio=medians[case].seconds / medians[PLAIN].seconds,
            processor_ratio=medians[case].processor_seconds / medians[PLAIN].processor_seconds,
            memory_ratio=peaks[case] / peaks[PLAIN],
            logits_bytes=4 * size.tokens * size.vocab_size,
        )


def _started(size: HeadSize, backend: Backend | None) -> Any:
    from megatron_fanformer.runtime import device, megatron_cpu

    device.prepare_libraries()
    if size.device == "cpu":
        device.hide_gpus()
        megatron_cpu.install()
    from megatron_fanformer.runtime.config import RuntimeConfig
    from megatron_fanformer.runtime.parallel import ParallelConfig, distributed

    runtime = RuntimeConfig(device=size.device, threads_per_rank=size.threads, distributed_backend=backend)
    return distributed(ParallelConfig(), runtime=runtime)


def _turn(size: HeadSize, grid: Any, chunk_tokens: int | None) -> tuple[Callable[[], None], int]:
    """A head's forward and backward, and its tokens per chunk (0: the default; None: the plain head, which has all).

    It is that of a model of one layer in megatron-core's data parallelism, whose float32 buffers it adds to.
    """
    import torch

    from megatron_fanformer.model.build import build_stages
    from megatron_fanformer.model.config import FANformerConfig
    from megatron_fanformer.model.dtypes import DTYPES
    from megatron_fanformer.model.kernels import KernelsConfig
    from megatron_fanformer.runtime.parallel import ParallelConfig
    from megatron_fanformer.training.step import wrap_stages

    model = FANformerConfig(
        num_layers=1,
        hidden_size=size.hidden_size,
        ffn_hidden_size=size.hidden_size,
        num_attention_heads=1,
        vocab_size=size.vocab_size,
        seq_length=size.tokens,
        untie_embeddings_and_output_weights=True,
    )
    parallel = ParallelConfig()
    kernels = KernelsConfig(
        transformer_impl="local",
        chunked_loss_head=chunk_tokens is not None,
        loss_head_chunk_tokens=chunk_tokens or None,
    )
    (stage,) = build_stages(model, parallel, grid, dtype=DTYPES[size.dtype], seed=0, kernels=kernels)
    (wrapped,) = wrap_stages([stage], parallel)
    wrapped.zero_grad_buffer()
    generator = torch.Generator().manual_seed(0)
    shape = (size.tokens, 1)
    hidden = torch.randn(*shape, size.hidden_size, generator=generator).to(grid.torch_device, DTYPES[size.dtype])
    labels = torch.randint(size.vocab_size, shape, generator=generator).to(grid.torch_device)
    hidden.requires_grad_()
    head = stage.output_layer

    def turn() -> None:
        hidden.grad = None
        if chunk_tokens is None:
            losses = stage.compute_language_model_loss(labels.t(), head(hidden)[0])
        else:
            losses = head.losses(hidden, labels_sb=labels)
        losses.sum().backward()

    return turn, size.tokens if chunk_tokens is None else head.chunk_tokens


def _wait(grid: Any) -> None:
    if grid.device != "cpu":
        import torch

        torch.cuda.synchronize()


def _peak_bytes(turn: Callable[[], None], grid: Any) -> int:
    if grid.device == "cpu":
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        before = _status_bytes("VmRSS")
        turn()
        return _status_bytes("VmHWM") - before
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    turn()
    return torch.cuda.max_memory_allocated() - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
