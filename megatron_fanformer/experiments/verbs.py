"""The verbs `sweep`, `report` and `experiment`, and their options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.options import Verb, argument, option

Action = Literal["dry-run", "run", "status", "report"]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    file: Path = argument(metavar="FILE")
    """The sweep (YAML), such as examples/sweeps/variants.yaml."""
    action: Action = argument()
    """dry-run: list the points with their parameters and FLOPs; run: train the cells that are not complete; status: how
    far each is; report: tables, intervals, a picture, result.json in the sweep's folder."""
    jobs: int = option(1, metavar="N", needs=("action=run",))
    """With run: number of cells to train at once, as several small models can share a GPU."""
    slurm: Path | None = option(None, metavar="SCRIPT", needs=("action=run",))
    """With run: write a Slurm array job from this script for single runs, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    paths: tuple[str, ...] = argument((), metavar="FOLDER")
    """Experiments, or folders of them (default: runs); or the word compare, and the folders of runs of two
    configurations, which may have several seeds each."""
    output: Path | None = option(None, metavar="PAGE")
    """A page .md (default: runs/report.md); with compare a folder (default: runs/dynamics)"""


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of `experiment`."""

    name: str | None = argument(None, metavar="NAME")
    """lipschitz, mod, holes or cost; without one, they are listed with their minutes."""
    output: Path | None = option(None, metavar="FOLDER", needs=("name",))
    """Folder of the results (default: runs/experiments/NAME)"""
    seeds: int | None = option(None, metavar="N", needs=("name",))
    """Number of seeds; every model has the same ones."""
    overrides: tuple[str, ...] = option((), needs=("name",))


SWEEP = Verb(
    name="sweep",
    help="Train one configuration at many points and seeds, and report what they show.",
    options=SweepOptions,
    run="megatron_fanformer.experiments.sweep:sweep",
    examples=("sweep examples/sweeps/compare.yaml run", "sweep examples/sweeps/compare.yaml report"),
    removed=dict.fromkeys(
        ("init", "--config", "--compare", "--seeds"), "copy examples/sweeps/compare.yaml, and change its base"
    )
    | dict.fromkeys(("--gpu", "--gpus"), "plan --config BASE --gpu NAME estimates the time of a run"),
)
REPORT = Verb(
    name="report",
    help="Write the page of the paper's experiments; compare two runs step by step.",
    options=ReportOptions,
    run="megatron_fanformer.experiments.report:report",
    examples=("report runs/sweeps --output runs/report.md", "report compare runs/transformer runs/fanformer"),
)
EXPERIMENT = Verb(
    name="experiment",
    help="One of the paper's smaller experiments, on this machine.",
    options=ExperimentOptions,
    run="megatron_fanformer.experiments.probe:experiment",
    examples=("experiment mod --output runs/mod", "experiment holes --seeds 2 --holes.weight_decays [0.0]"),
    notes="Every setting of an experiment can be set as --NAME.FIELD VALUE; its result.json lists them.",
    removed=dict.fromkeys(
        ("--checkpoint", "--write-data"), "holes trains its models from scratch; evaluate tests fine-tuned ones"
    ),
)
