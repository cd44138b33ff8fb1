"""Writes what `megatron-fanformer plan --search` finds: the layouts of the examples, and a table of docs/planning.md.

    python tools/update_plans.py            # rewrite examples/fanformer-*.yaml and docs/planning.md; minutes
    python tools/update_plans.py --check    # exit 1 if one of them is out of date

Each example has a table in its header, of the fastest layout on every number of GPUs in `GPUS`; the section `parallel`
and `training.micro_batch_size` are the row of the ranks that the header states. The page has a table of weak scaling.
Everything else is written by hand.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_fanformer import markdown
from megatron_fanformer.planning.machines import load_machine
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.sizing.candidates import layout_lines, layout_name
from megatron_fanformer.sizing.estimate import GIB, Estimate, cost, for_machine
from megatron_fanformer.sizing.search import search
from megatron_fanformer.training.config import RunConfig, load_config

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "planning.md"
GPU = "h100"
GPUS = (8, 64, 256, 1024)
WEAK_GPUS = (8, 64, 512, 4096)
WEAK_MODELS = ("fanformer-1b", "fanformer-7b")
SAMPLES_PER_GPU = 8
TABLE = re.compile(r"(<!-- weak scaling -->\n).*?(<!-- end of weak scaling -->)", re.DOTALL)
BLOCK = re.compile(r"# -- layouts by .*?# -- end of layouts\n", re.DOTALL)
PARALLEL = re.compile(r"(?<=^parallel:\n)(?:  .*\n)+", re.MULTILINE)
MICRO_BATCH = re.compile(r"^  micro_batch_size: .*$", re.MULTILINE)
RANKS = re.compile(r"^# Ranks: (\d+)", re.MULTILINE)


def main() -> int:
    """Rewrite the examples, or report which of them are out of date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    options = parser.parse_args()
    is_stale = False
    for file in [*sorted(EXAMPLES.glob("fanformer-*.yaml")), PAGE]:
        text = page(PAGE.read_text(encoding="utf-8")) if file == PAGE else planned(file)
        if text == file.read_text(encoding="utf-8"):
            continue
        is_stale = True
        if options.check:
            print(f"{file.relative_to(ROOT)} is not what plan --search finds; run {Path(__file__).name}")
        else:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return int(options.check and is_stale)


def planned(file: Path) -> str:
    """What the file should hold."""
    text = file.read_text(encoding="utf-8")
    ranks = int(RANKS.search(text)[1])  # type: ignore[index]
    config = _without_layout(file)
    found = {gpus: search(config, gpus, load_machine(GPU)).best for gpus in GPUS}
    own = found[ranks]
    if own is None:
        raise SystemExit(f"{file.name}: nothing fits {ranks} GPUs; state another number of ranks")
    base = dataclasses.replace(own.config, parallel=dataclasses.replace(own.config.parallel, data_parallel_size=None))
    rows = [f"# {line}".rstrip() for line in _rows(found, base)]
    text = BLOCK.sub(lambda _: "\n".join([*rows, "# -- end of layouts\n"]), text)
    _, *fields = itertools.takewhile(lambda line: line != "training:", layout_lines(own.config, own.config))
    text = PARALLEL.sub(lambda _: "".join(f"{line}\n" for line in fields), text)
    size, number = own.job.micro_batch_size, own.job.num_micro_batches
    per_step = f"{number} micro batch{'es' if number > 1 else ''} per step at {ranks} ranks"
    return MICRO_BATCH.sub(f"  micro_batch_size: {size}  # as the layout: {per_step}", text)


def page(text: str) -> str:
    """The page with its table of weak scaling rebuilt."""
    columns = ["model", "GPUs", "global batch", "layout", "s/step", "tokens/s a GPU", "MFU", "of 8 GPUs' rate", "GiB"]
    rows = (row for name in WEAK_MODELS for row in _weak_rows(name))
    table = markdown.table(columns, rows, align="lrrlrrrrr")
    return TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def _weak_rows(name: str) -> Iterator[list[str]]:
    config = _without_layout(EXAMPLES / f"{name}.yaml")
    first = 0.0
    for gpus in WEAK_GPUS:
        training = dataclasses.replace(config.training, global_batch_size=SAMPLES_PER_GPU * gpus)
        best = search(dataclasses.replace(config, training=training), gpus, load_machine(GPU)).best
        asked = [name, f"{gpus:,}", f"{training.global_batch_size:,}"]
        if best is None:
            yield [*asked, "none fits", *[""] * 5]
            continue
        rate = best.time.tokens_per_second / gpus
        first = first or rate
        times = [f"{best.time.seconds:.3f}", f"{rate:,.0f}", f"{best.time.model_flops_utilization:.1%}"]
        yield [*asked, f"`{best.name}`", *times, f"{rate / first:.0%}", f"{best.needed_bytes / GIB:.1f}"]


def _without_layout(file: Path) -> RunConfig:
    """A configuration on the GPU asked about; the layout that the file has now shall not matter."""
    config = for_machine(load_config(file), load_machine(GPU), on_cpu=False)
    return dataclasses.replace(config, parallel=ParallelConfig())


def _rows(found: dict[int, Estimate | None], base: RunConfig) -> Iterator[str]:
    machine = load_machine(GPU)
    yield f"-- layouts by `plan --search`, on {machine.name}: predicted, not measured"
    yield f"{'GPUs':>5} {'s/step':>8} {'MFU':>6} {'GiB':>5} {'days':>7}  layout"
    for gpus, best in found.items():
        if best is None:
            yield f"{gpus:>5}  none fits"
            continue
        training, time = base.training, best.time
        days = cost(best, training.train_iters * training.global_batch_size * base.model.seq_length, None).days
        memory = best.needed_bytes / GIB
        yield (
            f"{gpus:>5} {time.seconds:>8.3f} {time.model_flops_utilization:>6.1%} {memory:>5.1f} {days:>7.1f}  "
            f"{layout_name(best.config, base)}"
        )


if __name__ == "__main__":
    sys.exit(main())
