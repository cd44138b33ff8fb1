"""Measures sums and gathers among the CPU ranks of this machine, by gloo and through memory that the ranks share.

    python tools/bench_collectives.py [--ranks 2] [--dtype bf16] [--repeats 20] [--json]

The two take turns, so that other load on the machine affects both alike; a time is the median of the first rank's
turns, each of which begins when all ranks are there. Each rank has one thread.
"""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from unittest import mock

from benchmarking.turns import clocked, parser_of, print_results

SIZES = (2**11, 2**19, 2**22, 2**25, 2**27)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who communicates, and what."""

    ranks: int = 2
    dtype: str = "bf16"
    repeats: int = 20


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of one collective."""

    collective: str
    bytes: int
    """Of the whole tensor: what is reduced, scattered or gathered."""
    gloo_seconds: float
    memory_seconds: float


def main() -> int:
    """Print a table, or one object per collective and size."""
    options = vars(parser_of(__doc__.splitlines()[0], Ranks()).parse_args())
    as_json = options.pop("json")
    asked = Ranks(**options)
    heading = f"{'':14} {'KiB':>8} {'gloo, ms':>9} {'memory, ms':>10} {'ratio':>6}"
    print_results(measure(asked), asked, heading=heading, line=_line, as_json=as_json)
    return 0


def _line(result: Result) -> str:
    return (
        f"{result.collective:14} {result.bytes // 1024:8} {result.gloo_seconds * 1e3:9.2f} "
        f"{result.memory_seconds * 1e3:10.2f} {result.gloo_seconds / result.memory_seconds:6.1f}"
    )


def measure(asked: Ranks) -> list[Result]:
    """All collectives at all sizes."""
    from megatron_fanformer.runtime import device
    from megatron_fanformer.runtime.rank_pool import RankPool

    device.quieten_libraries()
    device.hide_gpus()
    with RankPool(prepare=_prepare) as pool:
        return [Result(**values) for values in pool.run(asked.ranks, _measure, asdict(asked))[0]]


def _prepare() -> None:
    from megatron_fanformer.runtime import cpu_collectives

    cpu_collectives.install()


def _measure(asked: dict[str, object]) -> list[dict[str, object]]:
    import torch
    import torch.distributed as dist

    from megatron_fanformer.model.dtypes import DTYPES
    from megatron_fanformer.runtime import device
    from megatron_fanformer.runtime.shared_memory import GroupMemory

    settings = Ranks(**asked)  # type: ignore[arg-type]
    device.keep_freed_memory()
    by_gloo = mock.patch.object(GroupMemory, "of", lambda _group: None)
    results = []
    for size in SIZES:
        part = torch.ones(size // settings.ranks // DTYPES[settings.dtype].itemsize, dtype=DTYPES[settings.dtype])
        whole = part.repeat(settings.ranks)
        for name, collective in (
            ("all-reduce", partial(dist.all_reduce, whole)),
            ("reduce-scatter", partial(dist.reduce_scatter_tensor, part, whole)),
            ("all-gather", partial(dist.all_gather_into_tensor, whole, part)),
        ):
            gloo, memory = [], []
            for _ in range(settings.repeats + 1):
                whole.fill_(1)  # sums must not grow without end
                dist.barrier()
                with by_gloo:
                    gloo.append(clocked(collective).seconds)
                whole.fill_(1)
                dist.barrier()
                memory.append(clocked(collective).seconds)
            seconds = {"gloo_seconds": median(gloo[1:]), "memory_seconds": median(memory[1:])}  # the first warms up
            results.append(asdict(Result(collective=name, bytes=whole.nbytes, **seconds)))
    return results


if __name__ == "__main__":
    sys.exit(main())
