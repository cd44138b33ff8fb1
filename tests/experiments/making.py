"""Sweeps for tests: of the small run, by the stand-in for `train`."""

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.small_runs import small_run, write_config

STAND_IN = (sys.executable, "-m", "tests.experiments.stand_in")


def write_sweep(place: Path, tokens: str, **fields: Any) -> Path:
    """A sweep's file, of two architectures at four sizes; `fields` replace its own."""
    data = {"train_data": [tokens], "valid_data": {"held-out": [tokens]}}
    write_config(place / "base.yaml", small_run(tokens, place / "not used", data=data))
    sizes = {f"d{size}": {"model.hidden_size": size} for size in (16, 24, 32, 48)}
    values: dict[str, Any] = {
        "experiment": "scaling in parameters",
        "folder": str(place / "sweep"),
        "base": "base.yaml",
        "changes": {"training.train_iters": 10, "schedule.lr_warmup_iters": 2},
        "axes": {
            "architecture": {"transformer": {"model.fan.placement": "none"}, "fanformer": {}},
            "size": sizes,
        },
        "seeds": 2,
        "report": {"compare": "architecture", "baseline": "transformer", "over": "parameters", "paper_saving": 0.692},
        **fields,
    }
    return write_config(place / "sweep.yaml", values)


def changed(file: Path, **fields: Any) -> Path:
    """The sweep's file with other fields."""
    return write_config(file, {**yaml.safe_load(file.read_text()), **fields})
