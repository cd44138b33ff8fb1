"""`megatron-fanformer parity`: trains a configuration's small form in one process and in each layout, and compares."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.model.config import DTYPES
from megatron_fanformer.parity import layouts as layout_texts
from megatron_fanformer.parity.communication import FullSize, LayoutCommunication, compare_communication
from megatron_fanformer.parity.comparison import (
    Baseline,
    Bounds,
    Differences,
    Finding,
    baseline_of,
    bounds_from,
    differences,
)
from megatron_fanformer.parity.shrinking import BUCKETS, SmallRun, shrink
from megatron_fanformer.parity.trial import Trace, TrialConfig, run_trial
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.rank_pool import JobFailed, RankPool
from megatron_fanformer.training.config import RunConfig, load_config
from megatron_fanformer.training.layout_rules import batch_problems, layout_problems

REORDERED_RUNS = 3
JOB_SECONDS = 600.0
RANK_BYTES = 500 * 2**20  # a gloo rank of a small model has 380 MiB resident (torch 2.13, megatron-core 0.16.1)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """What to compare, and how long."""

    file: Path
    overrides: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    """As `parse_layout` reads them; none: the configuration's own."""
    steps: int = 20
    dtype: str = "fp32"
    communication: bool = False
    """Whether to count what a step's collectives move, too."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What to run on, whatever the configuration says: a cluster's is compared on a laptop as well."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """The layers, likewise."""


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """What became of one layout."""

    name: str
    ranks: int
    differences: Differences | None
    """None where the layout did not run to its end."""
    findings: tuple[Finding, ...]
    """In forward order; empty where the layout computes the same model."""
    failure: str | None = None
    """Why it did not run to its end."""

    @property
    def is_same(self) -> bool:
        """Whether the order of sums explains every difference."""
        return self.failure is None and not self.findings

    @property
    def verdict(self) -> str:
        """One line: the same, or where it begins to differ."""
        if self.failure is not None:
            return f"failed: {self.failure.strip().splitlines()[-1]}"
        return "same" if self.is_same else f"differs first in the {self.findings[0]}"


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """All that a comparison showed."""

    small: SmallRun
    steps: int
    dtype: str
    device: str
    noise: list[Differences]
    """Of the single-process runs that show what rounding explains: reordered ones, and below fp32 one in fp32."""
    bounds: Bounds
    layouts: list[LayoutResult]
    communication: list[LayoutCommunication]
    """Where it was asked for."""

    def check(self) -> None:
        """Raise DivergenceError, a line for each layout that does not compute the same model."""
        different = [f"layout {result.name}: {result.verdict}" for result in self.layouts if not result.is_same]
        different += [
            f"layout {counted.name}: the bytes counted are not those of the formula"
            for counted in self.communication
            if not counted.agrees
        ]
        if different:
            raise DivergenceError("\n".join(different))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One process's run of the small form, and how far rounding alone takes a run from it."""

    run: RunConfig
    small: SmallRun
    trial: TrialConfig
    baseline: Baseline
    noise: list[Differences]
    bounds: Bounds


def run_parity(
    config: ParityConfig, *, pool: RankPool | None = None, tell: Callable[[str], None] = lambda _: None
) -> ParityResult:
    """Compare layouts.

    Args:
        pool: ranks to run on; None starts and ends its own.
        tell: is told what runs next.

    Raises:
        InputError: the configuration or a layout is wrong; all that is, one line each.
    """
    run, named = read_layouts(config)
    kind = devices.resolve_device(run.parallel.device)
    _check_machine(named, kind)
    with RankPool(kind, JOB_SECONDS) if pool is None else nullcontext(pool) as ranks:
        calibration = calibrate(config, run, list(named.values()), ranks, tell)
        return compare_layouts(calibration, named, ranks, tell, communication=config.communication)


def read_layouts(config: ParityConfig) -> tuple[RunConfig, dict[str, ParallelConfig]]:
    """The configuration, and the layouts by their names, each checked on the configuration at its full size."""
    run = load_config(config.file, config.overrides)
    parallel = dataclasses.replace(run.parallel, device=config.device, transformer_impl=config.transformer_impl)
    run = dataclasses.replace(run, parallel=parallel)
    found = []
    if config.steps < 1:
        found.append(f"--steps is {config.steps}; it must be at least 1")
    named: dict[str, ParallelConfig] = {}
    if not config.layouts:
        named = dict([layout_texts.own_layout(run.parallel)])
    for text in config.layouts:
        try:
            named[text] = layout_texts.parse_layout(text, run.parallel)
        except InputError as error:
            found.append(str(error))
    found += [*run.model.problems(), *run.optimizer.problems(), *run.training.problems()]  # data is not read
    for text, layout in named.items() if not found else ():
        found += [f"layout {text!r}: {problem}" for problem in _layout_problems(run, layout)]
    if found:
        raise InputError("\n".join(found))
    return run, named


def _layout_problems(run: RunConfig, layout: ParallelConfig) -> list[str]:
    batch, micro = run.training.global_batch_size, run.training.micro_batch_size
    return [
        *layout.problems(),
        *layout_problems(run.model, layout),
        *batch_problems(layout, layout.data_parallel_size or 1, batch, micro),
    ]


def _check_machine(named: dict[str, ParallelConfig], kind: devices.DeviceKind) -> None:
    ranks, text = max((layout_texts.world_size(layout), text) for text, layout in named.items())
    if kind == "cuda":
        fit, unit = torch.cuda.device_count(), "GPUs"
    else:
        fit, unit = max(1, psutil.virtual_memory().available // RANK_BYTES), "ranks of 500 MiB in its free memory"
    if ranks > fit:
        raise InputError(
            f"layout {text!r} asks for {ranks} ranks, but this machine has room for {fit} {unit}; choose a smaller one"
        )


def calibrate(
    config: ParityConfig,
    run: RunConfig,
    layouts: list[ParallelConfig],
    pool: RankPool,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Train the small form that suits all these layouts in one process: as it is, and so that it shows rounding."""
    single = layout_texts.single_process(run.parallel)
    small = shrink(run.model, run.training.micro_batch_size, layouts)
    trial = TrialConfig(
        model=small.model,
        optimizer=run.optimizer,
        global_batch_size=small.global_batch_size,
        micro_batch_size=small.micro_batch_size,
        steps=config.steps,
        dtype=config.dtype,
        device=devices.resolve_device(run.parallel.device),
    )
    tell(layout_texts.SINGLE)
    baseline = baseline_of(pool.run(1, run_trial, trial, single)[0], torch.finfo(DTYPES[config.dtype]).eps)
    noise = []
    for number in range(1, REORDERED_RUNS + 1):
        tell(f"{layout_texts.SINGLE}, reordered ({number} of {REORDERED_RUNS})")
        noise.append(differences(baseline, pool.run(1, run_trial, trial, single, number)))
    if config.dtype != "fp32":
        # Ranks round their partial sums to that type before they are added, which no reordering of one process does:
        # what rounding to it changes at all is shown by a run without it.
        tell(f"{layout_texts.SINGLE}, in fp32")
        exact = dataclasses.replace(trial, dtype="fp32")
        noise.append(differences(baseline, pool.run(1, run_trial, exact, single)))
    return Calibration(run=run, small=small, trial=trial, baseline=baseline, noise=noise, bounds=bounds_from(noise))


def compare_layouts(
    calibration: Calibration,
    named: dict[str, ParallelConfig],
    pool: RankPool,
    tell: Callable[[str], None] = lambda _: None,
    *,
    trial_function: Callable[..., Trace] = run_trial,
    communication: bool = False,
) -> ParityResult:
    """Run layouts that the calibration's small form suits, and hold them against it.

    Args:
        trial_function: what each rank runs; a test plants faults in it.
        communication: whether to count what a step's collectives move, too.
    """
    small, trial = calibration.small, calibration.trial
    results, counted = [], []
    for name, layout in named.items():
        tell(name)
        bucketed, ranks = _with_buckets(layout, small), layout_texts.world_size(layout)
        run_ranks = functools.partial(pool.run, ranks, trial_function, trial, bucketed)
        results.append(_try_layout(name, ranks, calibration, run_ranks))
        if communication:
            tell(f"{name}, counting bytes")
            counted.append(compare_communication(pool.run, trial, _full_size(calibration.run), name, bucketed))
    return ParityResult(
        small=small,
        steps=trial.steps,
        dtype=trial.dtype,
        device=trial.device,
        noise=calibration.noise,
        bounds=calibration.bounds,
        layouts=results,
        communication=counted,
    )


def _try_layout(name: str, ranks: int, calibration: Calibration, run_ranks: Callable[[], list[Trace]]) -> LayoutResult:
    try:
        found = differences(calibration.baseline, run_ranks())
    except JobFailed as failure:
        return LayoutResult(name=name, ranks=ranks, differences=None, findings=(), failure=str(failure))
    return LayoutResult(name=name, ranks=ranks, differences=found, findings=tuple(calibration.bounds.findings(found)))


def _full_size(run: RunConfig) -> FullSize:
    training = run.training
    return FullSize(
        model=run.model, micro_batch_size=training.micro_batch_size, global_batch_size=training.global_batch_size
    )


def _with_buckets(layout: ParallelConfig, small: SmallRun) -> ParallelConfig:
    if not layout.overlap_grad_reduce:
        return layout
    return dataclasses.replace(layout, ddp_bucket_size=max(1, small.model.num_parameters // BUCKETS))
