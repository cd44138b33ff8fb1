"""Runs whose token files are on another store: the losses of a run on local files, to the bit, also from one to the
other.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.checkpoint import run_folder
from tests.data.failing_stores import http_server
from tests.small_runs import VOCAB_SIZE, small_run, write_tokens
from tests.train.test_trainer import train

RunOnRanks = Callable[..., list[Any]]


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / run_folder.METRICS).read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", ["file", pytest.param("http", marks=pytest.mark.full)])
def test_a_run_goes_on_with_the_same_files_on_another_store(
    kind: str, run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    """Begun on local files, continued at a URL, and ended on local files; against one that stayed."""
    (folder := tmp_path / "data").mkdir()
    write_tokens(folder / "tokens")
    (np.arange(1000) * 7 % VOCAB_SIZE).astype("<u2").tofile(folder / "own.npy")

    def run(name: str, place: str, until: int, **data: Any) -> Path:
        values = small_run(
            "",
            tmp_path / name,
            data={
                "train_data": ["0.5", f"{place}/tokens", "0.5", f"{place}/own.npy"],
                "cache_path": str(tmp_path / "cache"),
                **data,
            },
            training={"train_iters": 6, "exit_interval": until},
            schedule={"lr_warmup_iters": 1},
        )
        run_on_ranks(1, train, values)
        return tmp_path / name

    stayed = losses(run("stayed", str(folder), 6))
    with nullcontext(f"file://{folder}") if kind == "file" else http_server(folder) as url:
        run("moved", str(folder), 2)
        run("moved", url, 4, num_workers=1)
        moved = losses(run("moved", str(folder), 6))
    assert moved == stayed and len(stayed) == 6
