"""What `sweep` takes; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.options import argument, option


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What `sweep` takes."""

    file: Path = argument(metavar="FILE")
    """The sweep (YAML), such as examples/sweeps/variants.yaml."""
    action: Literal["dry-run", "run", "status", "report"] = argument()
    """dry-run: list the cells and what they cost; run: train those that are not complete, one after the other; status:
    how far each is; report: tables, intervals, pictures, result.json in the sweep's folder."""
    slurm: Path | None = option(None, metavar="SCRIPT")
    """With run: write a Slurm array by this script for one run; start none."""
    gpu: str | None = option(None, metavar="NAME_OR_FILE")
    """With dry-run: the machine whose time is estimated, as plan takes it."""
    gpus: int = option(1, metavar="N")
    """With --gpu: how many train a cell."""
