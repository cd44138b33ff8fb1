"""Measure two kernels in turns: the FAN activation beside a copy and PyTorch, the chunked loss head beside Megatron's.

    python tools/bench_kernels.py fan                                # on this machine's CPU, or GPU
    python tools/bench_kernels.py fan --device cuda --hidden-size 4096 --p-ratio 0.125 --json
    python tools/bench_kernels.py loss-head --dtype bf16 --tokens 16384 --hidden-size 2048 --device cuda

A time is the median over turns. The bytes of the FAN activation are the least that must move: forward reads p | g and
writes X_F, backward reads cos p, sin p and X_F's gradient and writes the gradient of p | g. The loss head's peak memory
is the maximum during a turn less the memory before it: resident on a CPU, allocated on a GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.ops import fan_activation
from megatron_fanformer.runtime import device as devices

REPEATS = {"cpu": 11, "cuda": 51}
WARM_UP_TURNS = 3
FLUSHED_BYTES = 2**30  # read before each turn on a GPU: empties the L2 cache, and lasts until the turn is queued
Turn = Callable[[], object]


def main() -> int:
    """Print a line, or with --json an object, for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=("fan", "loss-head"))
    parser.add_argument("--device", choices=tuple(REPEATS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="(all)")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of a micro batch (2048)")
    parser.add_argument("--hidden-size", type=int, default=2048, metavar="N", help="(2048)")
    parser.add_argument("--p-ratio", type=float, default=0.25, metavar="P", help="of fan (0.25)")
    parser.add_argument("--vocab-size", type=int, default=50304, metavar="N", help="of loss-head (50304)")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="of loss-head, as runs use it")
    parser.add_argument("--repeats", type=int, metavar="N", help="turns that are timed (cpu 11, cuda 51)")
    parser.add_argument("--json", action="store_true", help="an object a line")
    options = parser.parse_args()
    options.repeats = options.repeats or REPEATS[options.device]
    measure = fan if options.kernel == "fan" else loss_head
    for result in measure(options):
        shown = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in result.items()
        )
        print(json.dumps(result) if options.json else shown, flush=True)
    return 0


def fan(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure forward and backward of each implementation that runs on the device."""
    device, h, periodic = options.device, options.hidden_size, int(options.p_ratio * options.hidden_size)
    for name in options.dtypes:
        dtype = torch_dtype(name)
        moved = {"forward": 2 * h - periodic, "backward": 2 * h + periodic}
        moved = {way: options.tokens * elements * dtype.itemsize for way, elements in moved.items()}
        source, target = torch.zeros(2, moved["forward"] // 2, dtype=torch.int8, device=device)
        pre = 3 * torch.randn(1, options.tokens, h - periodic, device=device).to(dtype)
        grad = torch.randn(options.tokens, h, device=device).to(dtype)
        x_f, grad_pre = torch.empty_like(grad), torch.empty_like(pre)
        turns: dict[tuple[str, str], Turn] = {("copy", "forward"): lambda a=source, b=target: b.copy_(a)}
        for form, kernel in _forms(pre).items():
            kernel.activate(pre, x_f, periodic, False)
            turns |= {
                (form, "forward"): lambda k=kernel, a=pre, b=x_f: k.activate(a, b, periodic, False),
                (form, "backward"): lambda k=kernel, a=x_f, b=grad, c=grad_pre: k.differentiate(
                    a, b, None, c, periodic
                ),
            }
        seconds = _medians(turns, options)
        copy_rate = moved["forward"] / seconds.pop(("copy", "forward"))
        for (form, way), spent in seconds.items():
            rate = moved[way] / spent
            case = {"form": form, "direction": way, "dtype": name}
            yield {**case, "seconds": spent, "bytes_per_second": rate, "share_of_copy": rate / copy_rate}


def _forms(tensor: torch.Tensor) -> dict[str, fan_activation.Implementation]:
    kernel = fan_activation.implementation_for(tensor)
    return {**({} if kernel is fan_activation.EAGER else {"kernel": kernel}), "eager": fan_activation.EAGER}


def loss_head(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure forward and backward of Megatron's head and of the chunked head."""
    devices.prepare_megatron(on_cpu=options.device == "cpu")
    from megatron_fanformer.runtime.layout import RuntimeConfig
    from megatron_fanformer.runtime.parallel import ParallelConfig, distributed

    runtime = RuntimeConfig(device=options.device, distributed_backend=options.distributed_backend)
    with distributed(ParallelConfig(), runtime=runtime) as grid:
        from megatron_fanformer.runtime.seeding import seed_everything  # after megatron-core was prepared

        seed_everything(0)
        for name in options.dtypes:
            turns = {
                case: _head_turn(options, torch_dtype(name), grid, case == "chunked") for case in ("plain", "chunked")
            }
            peaks = {case: _peak_bytes(turn, options.device) for case, turn in turns.items()}
            seconds = _medians(turns, options)
            for case in turns:
                time_ratio, memory_ratio = seconds[case] / seconds["plain"], peaks[case] / peaks["plain"]
                ratios = {"time_ratio": time_ratio, "memory_ratio": memory_ratio}
                yield {
                    "case": case,
                    "dtype": name,
                    "seconds": seconds[case],
                    "peak_memory_bytes": peaks[case],
                    **ratios,
                }


def _head_turn(options: argparse.Namespace, dtype: torch.dtype, grid: Any, is_chunked: bool) -> Turn:
    """Return a function for one forward and backward of a head, in a model with megatron-core's gradient buffers."""
    from megatron_fanformer.model.build import build_stages
    from megatron_fanformer.model.config import FANformerConfig, KernelsConfig
    from megatron_fanformer.runtime.parallel import ParallelConfig
    from megatron_fanformer.train.step import wrap_stages

    width = options.hidden_size
    model = FANformerConfig(
        num_layers=1,
        hidden_size=width,
        ffn_hidden_size=width,
        num_attention_heads=1,
        vocab_size=options.vocab_size,
        seq_length=options.tokens,
        untie_embeddings_and_output_weights=True,
    )
    kernels = KernelsConfig(transformer_impl="local", chunked_loss_head=is_chunked)
    (stage,) = build_stages(model, ParallelConfig(), grid, dtype=dtype, seed=0, kernels=kernels)
    (wrapped,) = wrap_stages([stage], ParallelConfig())
    wrapped.zero_grad_buffer()
    hidden = torch.randn(options.tokens, 1, width, device=grid.torch_device).to(dtype).requires_grad_()
    labels = torch.randint(options.vocab_size, (options.tokens, 1), device=grid.torch_device)
    head = stage.output_layer

    def turn() -> None:
        hidden.grad = None
        if is_chunked:
            losses = head.losses(hidden, labels_sb=labels)
        else:
            losses = stage.compute_language_model_loss(labels.t(), head(hidden)[0])
        losses.sum().backward()

    return turn


def _medians(turns: dict[Any, Turn], options: argparse.Namespace) -> dict[Any, float]:
    """Return the median seconds of each function, which take turns; on a GPU with cold caches."""
    clock = _seconds_on_gpu if options.device == "cuda" else _seconds_on_cpu
    flushed = torch.empty(FLUSHED_BYTES if options.device == "cuda" else 0, dtype=torch.int8, device=options.device)
    seconds: dict[Any, list[float]] = {name: [] for name in turns}
    for _ in range(WARM_UP_TURNS + options.repeats):
        for name, turn in turns.items():
            seconds[name].append(clock(turn, flushed))
    return {name: median(times[WARM_UP_TURNS:]) for name, times in seconds.items()}


def _seconds_on_cpu(turn: Turn, _flushed: torch.Tensor) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started


def _seconds_on_gpu(turn: Turn, flushed: torch.Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.view(torch.int64).sum()  # a sum writes nothing to the cache; the turn is queued while it runs
    before.record()
    turn()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _peak_bytes(turn: Turn, device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        turn()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    turn()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
