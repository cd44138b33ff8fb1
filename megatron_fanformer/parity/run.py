"""The verb `parity`: train a configuration's small form in one process and in each layout, and compare the runs."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import psutil
import torch

from megatron_fanformer import __version__
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.model.layouts import SINGLE, Layout, single_process
from megatron_fanformer.parity.comparison import (
    FACTOR,
    KINDS,
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
from megatron_fanformer.parity.verb import ParityConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.rank_pool import JobFailed, RankPool
from megatron_fanformer.terminal import phases, show, table
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.machine_rules import backend_problems, has_engine, kernel_problems, layer_problems

REORDERED_RUNS = 3  # that measure the noise of rounding
COLUMNS = ("first loss", "outputs", "gradients", "losses", "weights")
JOB_SECONDS = 600.0  # after which a run that has not ended counts as failed
RANK_BYTES = 500 * 2**20  # a gloo rank of a small model has 380 MiB resident (torch 2.13, megatron-core 0.16.1)


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """The result of one layout."""

    name: str
    ranks: int
    differences: Differences | None = None
    """Differences from the baseline; None if the layout's ranks failed."""
    findings: tuple[Finding, ...] = ()
    """Findings in forward order; empty if the layout computes the same model."""
    failure: str | None = None
    """The error of the layout's ranks, if they failed."""

    @property
    def is_same(self) -> bool:
        """Return whether the order of sums explains every difference."""
        return self.failure is None and not self.findings

    @property
    def verdict(self) -> str:
        """Return the result in one line: "same", the first finding, or the failure."""
        if self.failure is not None:
            return f"failed: {self.failure.strip().splitlines()[-1]}"
        return "same" if self.is_same else f"differs first in the {self.findings[0]}"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The run of the small form in a single process, and the differences that rounding alone causes."""

    small: SmallRun
    trial: TrialConfig
    baseline: Baseline
    noise: list[Differences]
    """Differences of further runs in a single process: reordered runs and, if the dtype is not fp32, a run in fp32."""
    bounds: Bounds


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """All results of a comparison."""

    calibration: Calibration
    layouts: list[LayoutResult]

    def check(self) -> None:
        """Raise DivergenceError if a layout does not compute the same model; the message has a line for each one."""
        different = [f"layout {layout.name}: {layout.verdict}" for layout in self.layouts if not layout.is_same]
        if different:
            raise DivergenceError("\n".join(different))


def parity(config: ParityConfig, run: RunConfig, named: dict[str, Layout]) -> None:
    """Compare layouts, print the table, and write the report.

    Raises:
        InputError: this machine lacks the ranks or the kernels of a layout.
        DivergenceError: a layout does not compute the same model.
    """
    with phases("starting ranks") as report, _start_pool(config, run, named) as pool:
        report("training in one process")
        calibration = calibrate(config, run, list(named.values()), pool)
        result = compare_layouts(calibration, named, pool, lambda name: report(f"training: {name}"))
    show(report_lines(result))
    if config.report is not None:
        write_atomically(config.report, as_json(result, str(config.file)))
    result.check()


def _start_pool(config: ParityConfig, run: RunConfig, named: dict[str, Layout]) -> RankPool:
    """Start the pool of ranks; raise InputError if this machine lacks the ranks or the kernels of a layout."""
    device = devices.resolve_device(run.runtime.device)
    backend = run.runtime.backend(device)
    problems = [
        f"layout {text!r}: {problem}"
        for text, layout in named.items()
        for problem in (
            *kernel_problems(layout.kernels),
            *layer_problems(
                run.model,
                layout.parallel,
                layout.kernels,
                uses_engine=has_engine(layout.kernels),
                in_fp32=config.dtype == "fp32",
            ),
            *backend_problems(layout.parallel, layout.kernels, backend, device),
        )
    ]
    if problems:
        raise InputError("\n".join(problems))
    ranks, text = max((layout.world_size, text) for text, layout in named.items())
    if backend == "nccl":
        room, unit = torch.cuda.device_count(), "GPUs"
    else:
        room, unit = max(1, psutil.virtual_memory().available // RANK_BYTES), "ranks of 500 MiB in its free memory"
    if ranks > room:
        raise InputError(
            f"layout {text!r} asks for {ranks} ranks, but this machine has room for {room} {unit}; choose a smaller one"
        )
    return RankPool(device, JOB_SECONDS, backend=backend)


def calibrate(config: ParityConfig, run: RunConfig, layouts: list[Layout], pool: RankPool) -> Calibration:
    """Train the small form for all these layouts in one process, and again in other orders, to measure rounding."""
    single = single_process(config.transformer_impl).parallel
    small = shrink(run.model, run.training.micro_batch_size, [layout.parallel for layout in layouts])
    trial = trial_of(config, run, small, pool.device)
    dtypes = (config.dtype, trial.optimizer.exp_avg_dtype, trial.optimizer.exp_avg_sq_dtype)
    epsilon, *state_epsilons = (torch.finfo(torch_dtype(dtype)).eps for dtype in dtypes)
    baseline = baseline_of(pool.run(1, run_trial, trial, single)[0], epsilon, max(state_epsilons))
    noise = [
        differences(baseline, pool.run(1, run_trial, trial, single, number)) for number in range(1, REORDERED_RUNS + 1)
    ]
    if config.dtype != "fp32":
        # Ranks round partial sums to bf16 before they add them, which no reordering of a single process does. A run in
        # fp32 shows how much such rounding changes.
        noise.append(differences(baseline, pool.run(1, run_trial, dataclasses.replace(trial, dtype="fp32"), single)))
    return Calibration(
        small=small, trial=trial, baseline=baseline, noise=noise, bounds=bounds_from(noise, baseline.last_places)
    )


def trial_of(config: ParityConfig, run: RunConfig, small: SmallRun, device: devices.DeviceKind) -> TrialConfig:
    """Return the settings of the trial in a single process; a layout's trial differs in its kernels."""
    return TrialConfig(
        model=small.model,
        optimizer=run.optimizer,
        global_batch_size=small.global_batch_size,
        micro_batch_size=small.micro_batch_size,
        steps=config.steps,
        dtype=config.dtype,
        device=device,
        within_documents=run.data.reset_attention_mask,
        z_loss_coefficient=run.training.z_loss_coefficient,
        grad_reduce_in_fp32=run.precision.grad_reduce_in_fp32,
        kernels=single_process(config.transformer_impl).kernels,
        runtime=run.runtime,
    )


def compare_layouts(
    calibration: Calibration,
    named: dict[str, Layout],
    pool: RankPool,
    report: Callable[[str], None] = lambda _: None,
    *,
    trial_function: Callable[..., Trace] = run_trial,
) -> ParityResult:
    """Run the small form in each layout, and compare the runs with the calibration.

    Args:
        trial_function: the function that each rank calls; a test plants faults in it.
    """
    results = []
    for name, layout in named.items():
        report(name)
        trial = dataclasses.replace(calibration.trial, kernels=layout.kernels)
        parallel, ranks = layout.parallel, layout.world_size
        if parallel.overlap_grad_reduce:  # a small model would have a single bucket, and so nothing to overlap
            parallel = dataclasses.replace(parallel, ddp_bucket_size=max(1, trial.model.num_parameters // BUCKETS))
        try:
            layout_differences = differences(calibration.baseline, pool.run(ranks, trial_function, trial, parallel))
        except JobFailed as error:
            result = LayoutResult(name=name, ranks=ranks, failure=str(error))
        else:
            findings = tuple(calibration.bounds.findings(layout_differences))
            result = LayoutResult(name=name, ranks=ranks, differences=layout_differences, findings=findings)
        results.append(result)
    return ParityResult(calibration=calibration, layouts=results)


# -- reports


def report_lines(result: ParityResult) -> Iterator[str]:
    """Yield a table with a row for each layout, after a row for the reordered runs of a single process."""
    calibration = result.calibration
    small, trial = calibration.small, calibration.trial
    yield (
        f"The configuration made small: {'; '.join(small.changes) or 'it is small already'}. Global batch "
        f"{small.global_batch_size}, micro batch {small.micro_batch_size}, {trial.steps} steps, {trial.dtype}, "
        f"{trial.device}."
    )
    noise = map(max, zip(*map(_largest, calibration.noise), strict=True))  # column by column, the largest of all runs
    rows = [(f"{SINGLE}, reordered", "1", *(f"{value:.1e}" for value in noise), "", "")]
    for layout in result.layouts:
        cells, closest = [""] * len(COLUMNS), ""
        if layout.differences is not None:
            cells = [f"{value:.1e}" for value in _largest(layout.differences)]
            closest = _closest(layout.differences, calibration.bounds)
        rows.append((layout.name, str(layout.ranks), *cells, closest, layout.verdict))
    columns = ("layout", "ranks", *COLUMNS, "largest, of its bound", "verdict")
    yield from table(columns, rows, align="l" + "r" * (1 + len(COLUMNS)) + "ll")
    yield (
        "Largest relative differences from one process: outputs and gradients of the first step, losses and weights of "
        f"all; a weight's relative to how far it moved. A bound is {FACTOR:g} times what the first row's runs showed."
    )


def _largest(differences: Differences) -> list[float]:
    """Return the largest difference of each of `COLUMNS`."""
    kinds = {kind: max(differences.tensors[kind].values()) for kind in KINDS}
    return [differences.losses[0], kinds["outputs"], kinds["gradients"], max(differences.losses), kinds["weights"]]


def _closest(differences: Differences, bounds: Bounds) -> str:
    """Return, as text, how large a share of its bound a tensor's difference is at most, and this tensor."""
    share, kind, name = max(
        (difference / bounds.tensors[kind][name], kind, name)
        for kind in KINDS
        for name, difference in differences.tensors[kind].items()
        if name in bounds.tensors[kind]
    )
    return f"{f'{share:.0%}' if share < 10 else f'{share:.0e}x'} {kind.removesuffix('s')} {name}"


def as_json(result: ParityResult, config_file: str) -> bytes:
    """Return the result as JSON. NaN and infinity, which JSON does not have, become null."""
    calibration = result.calibration
    values = {
        "megatron_fanformer": __version__,
        "megatron_core": version("megatron-core"),
        "torch": str(torch.__version__),  # torch's own type of version is no plain string
        "config": config_file,
        "small": calibration.small,
        **{name: getattr(calibration.trial, name) for name in ("device", "dtype", "steps")},
        "bound_factor": FACTOR,
        "noise": calibration.noise,
        "bounds": calibration.bounds,
        "layouts": [{**vars(layout), "verdict": layout.verdict} for layout in result.layouts],
        "same": all(layout.is_same for layout in result.layouts),
    }
    return msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"
