"""Whole runs in bf16 on the kernels for a CPU: losses as by PyTorch's forms, up to rounding; a resume bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import small_run, train

RunOnRanks = Callable[..., list[Any]]

ROUNDED = 2e-3  # relative: of losses near 4.6, over ten steps in which bf16 is rounded at other places


def train_by(cache: Path | None, values: dict[str, Any]) -> str | None:
    """Train, by the kernels where a cache is given; why there are none."""
    from megatron_fanformer.ops import cpu_kernels

    if cache is not None and (problem := cpu_kernels.load(cache)):
        return problem
    try:
        train(values)
    finally:
        cpu_kernels.unload("the test is over")
    return None


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_runs_in_bf16(run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, ranks: int) -> None:

    def run(name: str, steps: int, cache: Path | None) -> list[float]:
        values = small_run(
            tokens,
            tmp_path / name,
            parallel={"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1},
            precision={"dtype": "bf16"},
            training={"train_iters": steps},
            schedule={"lr_decay_iters": 10},
            checkpoint={"save_interval": 5},
        )
        if any(problems := run_on_ranks(ranks, train_by, cache, values)):
            pytest.skip(str(problems[0]))
        return [entry["loss"] for entry in read_metrics(tmp_path / name)]

    plain, whole = run("plain", 10, None), run("whole", 10, tmp_path / "cache")
    run("resumed", 5, tmp_path / "cache")
    assert whole == pytest.approx(plain, rel=ROUNDED, abs=0)
    assert whole != plain
    assert run("resumed", 10, tmp_path / "cache") == whole
