"""The verb `sweep`, and its options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.options import Verb, argument, option
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    file: Path = argument(metavar="FILE")
    """The sweep (YAML), such as examples/sweeps/variants.yaml."""
    action: Literal["dry-run", "run", "status", "report"] = argument()
    """dry-run: list the cells and what they cost; run: train those that are not complete; status: how far each is;
    report: tables, intervals, pictures, result.json in the sweep's folder."""
    jobs: int = option(1, metavar="N")
    """With run: number of cells to train at once, as several small models can share a GPU."""
    slurm: Path | None = option(None, metavar="SCRIPT")
    """With run: write a Slurm array job from this script for single runs, and start nothing."""
    gpu: str | None = option(None, metavar="NAME_OR_FILE")
    """With dry-run: the machine whose time is estimated, as plan takes it."""
    gpus: int = option(1, metavar="N")
    """With --gpu: number of GPUs that train a cell."""


def _sweep(options: SweepOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import report_stopped

    with ended_by_stop_signals(report_stopped):
        device.prepare_libraries()
        from megatron_fanformer.experiments.sweeps.command import sweep

        sweep(options)


SWEEP = Verb(
    name="sweep",
    help="Train one configuration at many points and seeds, and report what they show.",
    options=SweepOptions,
    run=_sweep,
    examples=("sweep examples/sweeps/variants.yaml dry-run", "sweep examples/sweeps/variants.yaml run"),
    results_are_files=True,
    takes_signals=True,
)
