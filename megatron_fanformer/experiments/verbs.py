"""The verbs `sweep`, `report` and `experiment`, and their options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.options import Verb, argument, option, overrides, path_or_none
from megatron_fanformer.plan.verb import count_of_gpus

Action = Literal["init", "dry-run", "run", "status", "report"]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    file: Path = argument(metavar="FILE")
    """The sweep (YAML), such as examples/sweeps/variants.yaml; with init, a file to be written."""
    action: Action = argument()
    """init: write FILE, which compares a run's model with others of as many parameters; dry-run: list the cells and
    their cost; run: train those that are not complete; status: how far each is; report: tables, intervals,
    pictures, result.json in the sweep's folder."""
    config: Path | None = option(None, metavar="RUN_YAML", parse=path_or_none)
    """With init: the configuration of a run, which every cell starts from."""
    compare: tuple[str, ...] | None = option(None, metavar="VARIANT")
    """With init: the variants to compare, the baseline first; transformer, fanformer, ffn-fan, atm, atl or original-fan
    (transformer fanformer)."""
    seeds: int | None = option(None, metavar="N")
    """With init: number of runs of each (3, the fewest that can show anything)."""
    jobs: int | None = option(None, metavar="N")
    """With run: number of cells to train at once (1), as several small models can share a GPU."""
    slurm: Path | None = option(None, metavar="SCRIPT")
    """With run: write a Slurm array job from this script for single runs, and start nothing."""
    gpu: str | None = option(None, metavar="NAME_OR_FILE")
    """With dry-run: the machine whose time is estimated, as plan takes it."""
    gpus: int | None = option(None, metavar="N", parse=count_of_gpus)
    """With --gpu: number of GPUs that train a cell (1)."""
    overrides: tuple[str, ...] = overrides()


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    paths: tuple[str, ...] = argument((), metavar="FOLDER")
    """Experiments, or folders of them (default: runs); or the word compare, and the folders of runs of two
    configurations, which may have several seeds each."""
    output: Path | None = option(None, metavar="PAGE")
    """A page .html, which is written as .md, too (default: runs/report.html); with compare a folder (default:
    runs/dynamics)"""


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of `experiment`."""

    name: str | None = argument(None, metavar="NAME")
    """lipschitz, mod, holes, cost or inference; without one, they are listed with their minutes."""
    output: Path | None = option(None, metavar="FOLDER")
    """Folder of the results (default: runs/experiments/NAME)"""
    seeds: int | None = option(None, metavar="N")
    """Number of seeds; every model has the same ones."""
    checkpoint: tuple[str, ...] | None = option(None, metavar="CHECKPOINT", repeated=True)
    """holes: a fine-tuned model; may be repeated."""
    write_data: Path | None = option(None, metavar="FOLDER")
    """holes: write conversations to fine-tune on, and end."""
    overrides: tuple[str, ...] = overrides()


SWEEP = Verb(
    name="sweep",
    help="Train one configuration at many points and seeds, and report what they show.",
    options=SweepOptions,
    run="megatron_fanformer.experiments.sweep:sweep",
    examples=(
        "sweep runs/compare.yaml init\n--config examples/tiny-cpu.yaml --compare transformer fanformer",
        "sweep runs/compare.yaml run",
    ),
    notes="With init, fields that all cells change can be set as --section.field VALUE.",
    results_are_files=True,
    takes_signals=True,
)
REPORT = Verb(
    name="report",
    help="Write the page of the paper's experiments; compare two runs step by step.",
    options=ReportOptions,
    run="megatron_fanformer.experiments.report:report",
    examples=("report runs/sweeps --output runs/report.html", "report compare runs/transformer runs/fanformer"),
)
EXPERIMENT = Verb(
    name="experiment",
    help="One of the paper's smaller experiments, on this machine.",
    options=ExperimentOptions,
    run="megatron_fanformer.experiments.probe:experiment",
    examples=(
        "experiment mod --output runs/mod",
        "experiment holes --seeds 2 --holes.weight_decays [0.0]",
    ),
    notes="Every setting of an experiment can be set as --NAME.FIELD VALUE; its result.json lists them.",
    results_are_files=True,
    takes_signals=True,
)
