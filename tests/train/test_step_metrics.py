"""What a step is reported by: norms of weights and updates in layouts, and the share of the chips' rate."""

import io
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_fanformer.train.step import weights_in_step
from tests.small_runs import small_run, trainer_of
from tests.train.layouts import gather, shards_of

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2-sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"}),
    "tp2-plain": (2, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "dp2": (2, {"data_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp2-instances": (2, {"data_parallel_size": 2, "num_distributed_optimizer_instances": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def held_bytes() -> int:
    """The most that this process has held so far: Linux counts it in KiB."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take_three_steps(values: dict[str, Any]) -> tuple[dict[str, Any], list[Any], tuple[int, int]]:
    """On a rank: the metrics of the third step, this rank's weights before and after it, and its memory around all."""
    before = held_bytes()
    with trainer_of(values, console=Console(file=io.StringIO())) as trainer:
        written: list[dict[str, Any]] = []
        trainer._logs.write = lambda _step, metrics: written.append(metrics)  # type: ignore[method-assign]
        weights = []
        for _ in range(3):
            trainer.take_step()
            with weights_in_step(trainer._wrapped):
                weights.append(shards_of(trainer._stages, trainer.grid))
    assert [("params_norm" in metrics) for metrics in written] == [False, False, True]
    return written[-1], weights[1:], (before, held_bytes())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ("cp2", "tp2-plain") else ()) for name in LAYOUTS]
)
def test_norms_are_those_of_the_whole_model(
    run_on_ranks: Callable[..., list[Any]], tmp_path: Path, tokens: str, name: str, tied: bool
) -> None:
    """Of every weight once: split ones, those that ranks hold copies of, and a tied embedding on two stages."""
    ranks, parallel = LAYOUTS[name]
    values = small_run(
        tokens,
        tmp_path / "run",
        parallel=parallel,
        model={"untie_embeddings_and_output_weights": not tied},
        optimizer={"lr": 1e-2, "weight_decay": 0.5},
        logging={"norm_interval": 3, "phase_interval": None, "straggler_interval": None},
    )
    check_norms(run_on_ranks(ranks, take_three_steps, values))


def check_norms(found: list[Any], update_error: float = 1e-5) -> None:
    """Hold the metrics of all ranks against their weights before and after the step.

    Args:
        update_error: bound of the update's norm, relative.
    """
    before, after = (gather([weights[number] for _, weights, _ in found]) for number in (0, 1))
    whole = torch.stack([weight.double().norm() for weight in after.values()]).norm()
    update = torch.stack([(weight.double() - before[key]).norm() for key, weight in after.items()]).norm()
    for metrics, _, _ in found:
        assert metrics["params_norm"] == pytest.approx(whole.item(), rel=1e-6)
        assert metrics["update_norm"] == pytest.approx(update.item(), rel=update_error)
        least, most = (max(held) for held in zip(*(own for _, _, own in found), strict=True))
        assert least <= metrics["peak_memory_bytes"] <= most
    assert len({metrics["peak_memory_bytes"] for metrics, _, _ in found}) == 1
