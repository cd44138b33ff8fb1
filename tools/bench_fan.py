"""Measures the FAN activation: bytes/s of forward and backward relative to a copy in the same run.

    python tools/bench_fan.py                                      # PyTorch on this machine's CPU
    python tools/bench_fan.py --device cuda --presets fanformer-1b fanformer-7b --p-ratios 0.125 0.25 0.5 --json

On a GPU the kernel is measured beside PyTorch. All forms of a case, and a copy of as many bytes as its forward moves,
take turns, so that other load on the machine affects all alike; a time is the median of its turns, each of them with
cold caches on a GPU. The bytes are those that have to move: forward reads p | g and writes X_F, backward reads cos p,
sin p and X_F's gradient and writes the gradient of p | g; so the share can be over 1 where a cache serves a form better
than a copy.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median

import torch

from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.ops import fan_activation

TOKENS = {"cpu": 2048, "cuda": 16384}  # of a micro batch; on a GPU more than its cache holds
REPEATS = {"cpu": 11, "cuda": 51}
WARM_UP_TURNS = 3
FLUSHED_BYTES = 2**30  # read before each turn on a GPU: many times its L2, and long enough to queue a turn behind
COPY = "copy"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the activation is given."""

    hidden_size: int
    p_ratio: float
    tokens: int
    dtype: str
    device: str

    @property
    def periodic(self) -> int:
        """P."""
        return int(self.p_ratio * self.hidden_size)

    @property
    def rows(self) -> int:
        """P + G."""
        return self.hidden_size - self.periodic

    def moved_bytes(self, direction: str) -> int:
        """What has to be read and written."""
        elements = self.rows + self.hidden_size + (2 * self.periodic if direction == "backward" else 0)
        return self.tokens * elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class FANResult:
    """One direction of one form."""

    form: str
    """`kernel` or `eager`."""
    direction: str
    """`forward` or `backward`."""
    seconds: float
    moved_bytes: int
    bytes_per_second: float
    copy_bytes_per_second: float
    """Of a copy, what it reads and what it writes."""
    share_of_copy: float


def main(arguments: list[str] | None = None) -> int:
    """Print a table, or one object per line."""
    options = _parser().parse_args(arguments)
    try:
        cases = _cases(options)
    except FanformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads or torch.get_num_threads())
    if not options.json:
        print(f"torch {torch.__version__} on {_device_name(options.device)}")
        print(f"{'h':>6} {'p':>6} {'tokens':>8} type {'form':6} {'way':8} {'µs':>9} {'GB/s':>8} {'copy':>8}  share")
    for case in cases:
        for result in measure(case, options.repeats or REPEATS[options.device]):
            print(json.dumps({**asdict(case), **asdict(result)}) if options.json else _line(case, result), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(TOKENS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--presets", nargs="+", default=["fanformer-1b"], metavar="NAME", help="whose widths (1b)")
    parser.add_argument("--hidden-sizes", nargs="+", type=int, default=[], metavar="H", help="in place of presets'")
    parser.add_argument("--p-ratios", nargs="+", type=float, default=[0.25], metavar="P", help="(0.25)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[], metavar="N", help="(cpu 2048, cuda 16384)")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="(all)")
    parser.add_argument("--repeats", type=int, help="turns that are timed (cpu 11, cuda 51)")
    parser.add_argument("--threads", type=int, help="on a CPU (as torch chooses)")
    parser.add_argument("--json", action="store_true", help="one object per line")
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no usable GPU; check nvidia-smi, or set it to cpu")
    if unknown := [name for name in options.presets if name not in PRESETS]:
        raise InputError(f"--presets {unknown[0]} is not a preset; choose one of {', '.join(PRESETS)}")
    if wrong := [p for p in options.p_ratios if not 0 <= p <= 0.5]:
        raise InputError(f"--p-ratios {wrong[0]} does not lie in [0, 0.5]; the paper uses 0.25")
    counts = [("--hidden-sizes", options.hidden_sizes), ("--tokens", options.tokens)]
    counts += [(name, [value]) for name, value in (("--repeats", options.repeats), ("--threads", options.threads))]
    for name, values in counts:
        if any(value is not None and value < 1 for value in values):
            raise InputError(f"{name} {min(values)} is too few; it must be at least 1")
    widths = options.hidden_sizes or list(dict.fromkeys(PRESETS[name].hidden_size for name in options.presets))
    tokens = options.tokens or [TOKENS[options.device]]
    return [
        Case(hidden_size=h, p_ratio=p, tokens=n, dtype=dtype, device=options.device)
        for dtype, n, h, p in product(options.dtypes, tokens, widths, options.p_ratios)
    ]


def measure(case: Case, repeats: int) -> Iterator[FANResult]:
    """Both directions of each form that runs there."""
    turns = {COPY: _copy(case)}
    for name, form in _forms(case).items():
        turns |= _directions(name, form, case)
    clock = _seconds_on_gpu if case.device == "cuda" else _seconds_on_cpu
    flushed = torch.empty(FLUSHED_BYTES if case.device == "cuda" else 0, dtype=torch.int8, device=case.device)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(WARM_UP_TURNS + repeats):
        for name, turn in turns.items():
            spent = clock(turn, flushed)
            if number >= WARM_UP_TURNS:
                seconds[name].append(spent)
    copy_rate = case.moved_bytes("forward") / median(seconds.pop(COPY))
    for name, times in seconds.items():
        form_name, direction = name.split()
        moved, spent = case.moved_bytes(direction), median(times)
        yield FANResult(
            form=form_name,
            direction=direction,
            seconds=spent,
            moved_bytes=moved,
            bytes_per_second=moved / spent,
            copy_bytes_per_second=copy_rate,
            share_of_copy=moved / spent / copy_rate,
        )


def _forms(case: Case) -> dict[str, fan_activation.Implementation]:
    chosen = fan_activation.implementation_for(torch.empty(0, dtype=DTYPES[case.dtype], device=case.device))
    kernel = {} if chosen is fan_activation.EAGER else {"kernel": chosen}
    return {**kernel, "eager": fan_activation.EAGER}


def _copy(case: Case) -> Callable[[], object]:
    source, target = torch.zeros(2, case.moved_bytes("forward") // 2, dtype=torch.int8, device=case.device)
    return lambda: target.copy_(source)


def _directions(name: str, form: fan_activation.Implementation, case: Case) -> dict[str, Callable[[], object]]:
    generator = torch.Generator(case.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(DTYPES[case.dtype])

    pre, grad = 3 * random(1, case.tokens, case.rows), random(case.tokens, case.hidden_size)
    x_f, grad_pre = torch.empty_like(grad), torch.empty_like(pre)
    form.activate(pre, x_f, case.periodic, False)
    return {
        f"{name} forward": lambda: form.activate(pre, x_f, case.periodic, False),
        f"{name} backward": lambda: form.differentiate(x_f, grad, None, grad_pre, case.periodic),
    }


def _seconds_on_cpu(turn: Callable[[], object], _flushed: torch.Tensor) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started


def _seconds_on_gpu(turn: Callable[[], object], flushed: torch.Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.view(torch.int64).sum()  # leaves nothing to be written back; the turn is queued while it runs
    before.record()
    turn()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"a CPU, {torch.get_num_threads()} threads"


def _line(case: Case, result: FANResult) -> str:
    return (
        f"{case.hidden_size:6} {case.p_ratio:6.3f} {case.tokens:8} {case.dtype} {result.form:6} {result.direction:8} "
        f"{result.seconds * 1e6:9.1f} {result.bytes_per_second / 1e9:8.1f} {result.copy_bytes_per_second / 1e9:8.1f} "
        f"{result.share_of_copy:6.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
