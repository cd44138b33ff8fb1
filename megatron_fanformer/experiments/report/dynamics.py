"""Two runs, or two of several seeds each, compared with each other step by step: whose loss falls faster, and when.

The paper says of FANformer that its loss falls more slowly than a Transformer's at first, and faster later on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.configuration import by_dotted_names
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.intervals import Mean, mean_of, standard_error, t_quantile, too_little
from megatron_fanformer.experiments.report.page import write_folder
from megatron_fanformer.experiments.result import Finding, Result, this_machine
from megatron_fanformer.experiments.sweeps.cells import OF_MACHINE
from megatron_fanformer.experiments.variants import VARIANTS
from megatron_fanformer.model.placements import TRANSFORMER
from megatron_fanformer.pictures import drawn
from megatron_fanformer.terminal import plural, some
from megatron_fanformer.train.metrics import read_metrics

SMOOTHED_SHARE = 0.05  # of the steps, over which a difference is averaged
PART = 0.2  # of the steps: the first are "early", the last "late"
PICTURE = "dynamics.png"
NO_CLAIM = "The paper says nothing of these two; its claim is of a Transformer, named first, and a FANformer."
SEED = "training.seed"
# Sections that do not decide what is learnt; precision and kernels do not either, up to rounding, but may be what is
# compared.
NOT_LEARNT = ("checkpoint", "evaluation", "logging", "parallel", "recovery", "runtime")


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """Losses of B minus those of A, from pairs of runs with the same seed."""

    names: tuple[str, str]
    """The difference between A's and B's configurations, such as `model.fan.placement none`."""
    seeds: list[int]
    steps: np.ndarray
    """[n]: the steps that all runs have."""
    differences: np.ndarray
    """[seeds, n]: smoothed differences in nats per token."""
    raw: np.ndarray
    """[seeds, n]: the differences before smoothing."""
    window: int
    """Steps that are averaged."""
    is_the_papers: bool
    """Whether A is a Transformer and B the paper's FANformer."""

    def part(self, *, late: bool) -> Mean:
        """Return the mean difference over the first, or the last, fifth of the steps, with its interval over the
        seeds.
        """
        count = max(1, round(PART * len(self.steps)))
        chosen = self.raw[:, -count:] if late else self.raw[:, :count]
        return mean_of(chosen.mean(axis=1).tolist())


def compare_runs(runs: Sequence[Path], output: Path) -> Result:
    """Compare runs, and write result.json, a picture and README.md into a folder.

    Args:
        runs: those that differ in seed alone are one side; the first is of A.

    Raises:
        InputError: they are not two sides with seeds in common, of batches with as many tokens.
    """
    dynamics = read_dynamics(runs)
    result = Result(
        experiment="training dynamics",
        settings={
            "runs": [str(run) for run in runs],
            "A": dynamics.names[0],
            "B": dynamics.names[1],
            "smoothed over steps": dynamics.window,
            "early and late, share of the steps": PART,
        },
        machine=this_machine(),
        seconds=sum(entry.get("step_seconds", 0.0) for run in runs for entry in read_metrics(run)),
        findings=list(_findings(dynamics)),
        pictures=[PICTURE],
    )
    picture = drawn(lambda panels: _draw(panels[0, 0], dynamics))
    write_folder(output, result, {PICTURE: picture})
    return result


def read_dynamics(runs: Sequence[Path]) -> Dynamics:
    """Return the two sides' losses, seed by seed. Raises like `compare_runs`."""
    sides: list[dict[int, Path]] = []
    identities: list[dict[str, Any]] = []
    for run in runs:
        fields = _fields(run)
        seed = fields.pop(SEED)
        if fields not in identities:
            identities.append(fields)
            sides.append({})
        side = sides[identities.index(fields)]
        if seed in side:
            raise InputError(f"{run} and {side[seed]} are of the same configuration and seed; name one of them")
        side[seed] = run
    if len(sides) != 2:
        fields_apart = some(_differing(identities))
        by = f", which differ in {fields_apart}" if fields_apart else ""
        configurations = plural(len(sides), "configuration")
        raise InputError(f"the {len(runs)} runs are of {configurations}{by}; name runs of two, of any seeds")
    seeds = sorted(sides[0].keys() & sides[1].keys())
    if not seeds:
        raise InputError("the two configurations have no seed in common; name runs of the same seeds")
    losses = [[_losses(side[seed]) for seed in seeds] for side in sides]
    steps = sorted(set.intersection(*(set(run_losses) for of_side in losses for run_losses in of_side)))
    if not steps:
        raise InputError("the runs have no step in common; name runs that have begun")
    tokens = {run_losses[steps[0]][1] for of_side in losses for run_losses in of_side}
    if len(tokens) > 1:
        raise InputError(
            f"step {steps[0]} ends after {sorted(tokens)} tokens in these runs; name runs of equal batches"
        )
    a, b = (np.array([[run_losses[step][0] for step in steps] for run_losses in of_side]) for of_side in losses)
    window = max(1, round(SMOOTHED_SHARE * len(steps)))
    models = [_papers_name(fields) for fields in identities]
    differing = _differing(identities)
    names = [", ".join(f"{name} {fields.get(name)}" for name in differing) for fields in identities]
    return Dynamics(
        names=(names[0], names[1]),
        seeds=seeds,
        steps=np.array(steps),
        differences=_smoothed(b - a, window),
        raw=b - a,
        window=window,
        is_the_papers=models == ["Transformer", "FANformer"],
    )


def _fields(run: Path) -> dict[str, Any]:
    """Return the fields that decide what a run learns, its seed included, by dotted names."""
    if not (run / run_folder.CONFIG).is_file():
        raise InputError(f"{run} is no run's folder: it has no {run_folder.CONFIG}; name runs")
    return {
        name: value
        for name, value in by_dotted_names(run_folder.read_mapping(run / run_folder.CONFIG)).items()
        if name not in OF_MACHINE and name.partition(".")[0] not in NOT_LEARNT
    }


def _papers_name(fields: dict[str, Any]) -> str | None:
    """Return which of the two models that the paper's claim is of has these fields; None for its other variants."""
    papers = VARIANTS["fanformer"]
    placement, activation, p_ratio = (
        fields.get(f"model.fan.{name}", getattr(papers, name)) for name in ("placement", "activation", "p_ratio")
    )
    if placement == TRANSFORMER:
        return "Transformer"
    return "FANformer" if (placement, activation) == (papers.placement, papers.activation) and p_ratio > 0 else None


def _differing(sides: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the fields that are not the same in all."""
    names = sorted({name for side in sides for name in side})
    return [name for name in names if any(side.get(name) != sides[0].get(name) for side in sides)]


def _losses(run: Path) -> dict[int, tuple[float, int]]:
    """Return loss and tokens so far, by step; skipped steps have none, and null is one that is not finite."""
    try:
        metrics = read_metrics(run)
    except FileNotFoundError:
        raise InputError(f"{run} has no {run_folder.METRICS}; name runs that have begun") from None
    return {entry["step"]: (entry["loss"], entry["tokens"]) for entry in metrics if entry.get("loss") is not None}


def _smoothed(rows: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over a window around each step, which is shorter at both ends."""
    ones = np.ones(window)
    counts = np.convolve(np.ones(rows.shape[1]), ones, "same")
    return np.array([np.convolve(row, ones, "same") / counts for row in rows])


def _findings(dynamics: Dynamics) -> Iterator[Finding]:
    for late, name, sign, claim in ((False, "early", 1, "higher at first"), (True, "late", -1, "lower at the end")):
        value, interval = dynamics.part(late=late)
        side = "above" if sign > 0 else "below"
        claim = f"The paper has FANformer's loss {claim}: it shows if the interval lies {side} 0."
        if not dynamics.is_the_papers:
            claim = NO_CLAIM
        short = too_little(seeds=len(dynamics.seeds), steps=len(dynamics.steps))
        shows = None
        if interval is None or short:
            outcome = short
        else:
            if dynamics.is_the_papers:
                shows = interval[0] > 0 if sign > 0 else interval[1] < 0
            outcome = f"the 95% interval over {len(dynamics.seeds)} seeds is {interval[0]:+.4f} to {interval[1]:+.4f}"
        yield Finding(
            name=f"training dynamics: B's loss, less A's, {name}",
            paper=f"{side} 0" if dynamics.is_the_papers else None,
            ours=value,
            interval=interval,
            unit="nats per token",
            shows=shows,
            exploratory=not dynamics.is_the_papers,
            sentence=(
                f"Over the {'last' if late else 'first'} {PART:.0%} of the steps the loss of B ({dynamics.names[1]}) "
                f"is {value:+.4f} nats per token off that of A ({dynamics.names[0]}); {outcome}. " + claim
            ),
        )


def _draw(axes: Any, dynamics: Dynamics) -> None:
    for seed, row in zip(dynamics.seeds, dynamics.differences, strict=True):
        axes.plot(dynamics.steps, row, linewidth=0.7, alpha=0.6, label=f"seed {seed}")
    if (seeds := len(dynamics.seeds)) > 1:
        mean = dynamics.differences.mean(axis=0)
        half = t_quantile(seeds - 1) * standard_error(dynamics.differences)
        axes.plot(dynamics.steps, mean, color="black", label="mean")
        axes.fill_between(dynamics.steps, mean - half, mean + half, color="black", alpha=0.12, label="95% interval")
    axes.axhline(0, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss of B − A, nats per token, mean of {dynamics.window} steps")
    axes.set_title(f"A: {dynamics.names[0]}\nB: {dynamics.names[1]}", fontsize="small")
    axes.legend()
