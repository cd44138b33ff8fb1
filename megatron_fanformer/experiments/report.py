"""Runs `megatron-fanformer report`: writes a page of experiments, or compares runs of two configurations step by step.

The comparison tests the paper's claim that FANformer's loss falls more slowly than a Transformer's at first, and faster
later on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.configuration import flatten
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.intervals import mean_of, shortage, standard_error, t_quantile
from megatron_fanformer.experiments.outcomes import DETERMINING, determining_fields
from megatron_fanformer.experiments.result import (
    README,
    RESULT,
    Finding,
    Measured,
    Result,
    as_markdown,
    read_result,
    write_folder,
)
from megatron_fanformer.experiments.verbs import ReportOptions
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.placements import PLACEMENTS
from megatron_fanformer.pictures import render_png
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import plural, show, some
from megatron_fanformer.train.metrics import read_metrics

COMPARE = "compare"
PAGE, COMPARISON = Path("runs/report.md"), Path("runs/dynamics")  # default outputs
MOST_DEPTH = 3  # levels of folders below a named folder in which results are looked for
SMOOTHED_SHARE = 0.05  # share of the steps over which a drawn difference is averaged
PART = 0.2  # share of the steps that are "early", and share that are "late"
NO_CLAIM = "The paper says nothing of these two; its claim is of a Transformer, named first, and a FANformer."
SEED = "training.seed"
COMPARED = (*DETERMINING, "kernels", "precision")
"""Sections by which two configurations are told apart; `kernels` and `precision` change losses by rounding alone."""


def report(options: ReportOptions) -> None:
    """Write the page of experiments, or the comparison of runs.

    Raises:
        InputError: there is no experiment, or the runs cannot be compared.
        CorruptError: a result is damaged.
    """
    device.prepare_libraries()
    if options.paths[:1] == (COMPARE,):
        output = options.output or COMPARISON
        result = compare_runs([Path(path) for path in options.paths[1:]], output)
        show([*(finding.sentence for finding in result.findings), f"wrote {output / README}"])
        return
    page = options.output or PAGE
    if page.suffix != ".md":
        raise InputError(f"--output {page} is no Markdown page; name it NAME.md")
    folders: dict[Path, None] = {}  # a set that keeps its order
    for folder in map(Path, options.paths or ("runs",)):
        files = [file for depth in range(MOST_DEPTH + 1) for file in sorted(folder.glob("*/" * depth + RESULT))]
        if not files:
            raise InputError(
                f"{folder} has no {RESULT}, nor have folders in it; name a sweep with a report, or a probe"
            )
        folders |= dict.fromkeys(file.parent for file in files)
    experiments = [(folder, read_result(folder)) for folder in folders]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, as_markdown(experiments, at=page.parent))
    show(finding.sentence for _, result in experiments for finding in result.findings)
    show([f"wrote {page}, of {plural(len(experiments), 'experiment')}"])


# -- two runs, or two of several seeds each


class Dynamics(NamedTuple):
    """Losses of B minus those of A, from pairs of runs with the same seed."""

    names: list[str]
    """A's and B's values of the fields in which they differ, such as `model.fan.placement none`."""
    seeds: list[int]
    steps: np.ndarray
    """[n]: the steps that all runs have."""
    differences: np.ndarray
    """[seeds, n]: in nats per token."""
    is_paper_pair: bool
    """True if A is a Transformer and B the paper's FANformer."""


def compare_runs(runs: Sequence[Path], output: Path) -> Result:
    """Compare runs, and write result.json, a picture and README.md into the folder `output`.

    Args:
        runs: folders of runs of two configurations, with one or several seeds each; the first run's configuration is A.

    Raises:
        InputError: the runs are not of two configurations with seeds in common, or their batches differ in size.
    """
    dynamics = read_dynamics(runs)
    settings = {
        "runs": [str(run) for run in runs],
        "A": dynamics.names[0],
        "B": dynamics.names[1],
        "early and late, share of the steps": PART,
    }
    measured = Measured(
        findings=list(_findings(dynamics)),
        pictures={"dynamics.png": render_png(lambda panels: _draw(panels[0, 0], dynamics))},
        seconds=sum(entry.get("step_seconds", 0.0) for run in runs for entry in read_metrics(run)),
    )
    return write_folder(output, "training dynamics", settings, measured)


def read_dynamics(runs: Sequence[Path]) -> Dynamics:
    """Return B's losses minus A's for each seed that both have; A is the first run's configuration, B the other one.

    Raises:
        InputError: the runs cannot be compared.
    """
    configurations: list[dict[str, Any]] = []  # A's and B's, without the seed
    runs_by_seed: list[dict[int, Path]] = []  # for each configuration
    for run in runs:
        if not (run / run_folder.METRICS).is_file():
            raise InputError(f"{run} is no run's folder: it has no {run_folder.METRICS}; name runs that have begun")
        fields = flatten(determining_fields(run_folder.read_mapping(run / run_folder.CONFIG), COMPARED))
        seed = fields.pop(SEED)
        if fields not in configurations:
            configurations.append(fields)
            runs_by_seed.append({})
        runs_by_seed[configurations.index(fields)][seed] = run
    names = sorted({name for fields in configurations for name in fields})
    # Values are compared as text, since lists cannot be in a set.
    differing = [name for name in names if len({repr(fields.get(name)) for fields in configurations}) > 1]
    if len(configurations) != 2:
        by = f", which differ in {some(differing)}" if differing else ""
        number = plural(len(configurations), "configuration")
        raise InputError(f"the {len(runs)} runs are of {number}{by}; name runs of two, of any seeds")
    seeds = sorted(runs_by_seed[0].keys() & runs_by_seed[1].keys())
    if not seeds:
        raise InputError("the two configurations have no seed in common; name runs of the same seeds")
    a_logs, b_logs = ([_entries_by_step(by_seed[seed]) for seed in seeds] for by_seed in runs_by_seed)
    steps = sorted(set.intersection(*(set(log) for log in a_logs + b_logs)))
    if not steps:
        raise InputError("the runs have no step in common; name runs that have begun")
    tokens = {log[steps[0]]["tokens"] for log in a_logs + b_logs}
    if len(tokens) > 1:
        raise InputError(
            f"step {steps[0]} ends after {sorted(tokens)} tokens in these runs; name runs of equal batches"
        )
    a, b = (np.array([[log[step]["loss"] for step in steps] for log in logs]) for logs in (a_logs, b_logs))
    return Dynamics(
        names=[", ".join(f"{name} {fields.get(name)}" for name in differing) for fields in configurations],
        seeds=seeds,
        steps=np.array(steps),
        differences=b - a,
        is_paper_pair=[_role_in_claim(fields) for fields in configurations] == ["transformer", "fanformer"],
    )


def _entries_by_step(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step with a loss; a skipped step has none, and a loss that is not finite is null."""
    return {entry["step"]: entry for entry in read_metrics(run) if entry.get("loss") is not None}


def _role_in_claim(fields: dict[str, Any]) -> str | None:
    """Return the model in the paper's claim that has these fields, "transformer" or "fanformer"; None for another."""
    paper = FANConfig()  # the defaults are the paper's
    placement, activation, p_ratio = (
        fields.get(f"model.fan.{name}", getattr(paper, name)) for name in ("placement", "activation", "p_ratio")
    )
    if not PLACEMENTS[placement].is_fanformer:
        return "transformer"
    return "fanformer" if (placement, activation) == (paper.placement, paper.activation) and p_ratio > 0 else None


def _findings(dynamics: Dynamics) -> Iterator[Finding]:  # one for the early steps, one for the late
    count = max(1, round(PART * len(dynamics.steps)))
    for name, differences, side, expected in (
        ("early", dynamics.differences[:, :count], "above", "higher at first"),
        ("late", dynamics.differences[:, -count:], "below", "lower at the end"),
    ):
        value, interval = mean_of(differences.mean(axis=1).tolist())
        claim = f"The paper has FANformer's loss {expected}: it shows if the interval lies {side} 0."
        outcome = shortage(seeds=len(dynamics.seeds), steps=len(dynamics.steps))
        shows = None
        if not outcome and interval is not None:  # there are enough seeds and steps
            if dynamics.is_paper_pair:
                shows = interval[0] > 0 if side == "above" else interval[1] < 0
            outcome = f"the 95% interval over {len(dynamics.seeds)} seeds is {interval[0]:+.4f} to {interval[1]:+.4f}"
        yield Finding(
            name=f"training dynamics: B's loss, less A's, {name}",
            paper=f"{side} 0" if dynamics.is_paper_pair else None,
            ours=value,
            interval=interval,
            unit="nats per token",
            shows=shows,
            exploratory=not dynamics.is_paper_pair,
            sentence=(
                f"Over the {name} {PART:.0%} of the steps the loss of B ({dynamics.names[1]}) is {value:+.4f} nats per "
                f"token off that of A ({dynamics.names[0]}); {outcome}. {claim if dynamics.is_paper_pair else NO_CLAIM}"
            ),
        )


def _draw(axes: Any, dynamics: Dynamics) -> None:
    """Draw the differences, averaged over a window of steps that is shorter at both ends."""
    width = max(1, round(SMOOTHED_SHARE * len(dynamics.steps)))
    counts = np.convolve(np.ones(len(dynamics.steps)), np.ones(width), "same")  # steps in the window around each step
    smoothed = np.array([np.convolve(row, np.ones(width), "same") / counts for row in dynamics.differences])
    for seed, row in zip(dynamics.seeds, smoothed, strict=True):
        axes.plot(dynamics.steps, row, linewidth=0.7, alpha=0.6, label=f"seed {seed}")
    if (seeds := len(dynamics.seeds)) > 1:
        mean, half = smoothed.mean(axis=0), t_quantile(seeds - 1) * standard_error(smoothed)
        axes.plot(dynamics.steps, mean, color="black", label="mean")
        axes.fill_between(dynamics.steps, mean - half, mean + half, color="black", alpha=0.12, label="95% interval")
    axes.axhline(0, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss of B − A, nats per token, mean of {width} steps")
    axes.set_title(f"A: {dynamics.names[0]}\nB: {dynamics.names[1]}", fontsize="small")
    axes.legend()
