"""Norms, memory and rates of a run are those of the whole model; the slow rank is named."""

import io
import logging
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.callbacks import SourceCounter, Stragglers, peak_flops_per_second
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.step import gathered_weights
from tests.small_runs import SEQ_LENGTH, RunOnRanks, small_run, trainer_of
from tests.train.layouts import gather, shards_of

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2-sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"}),
    "dp2": (2, {"data_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp2-instances": (2, {"data_parallel_size": 2, "num_distributed_optimizer_instances": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def held_bytes() -> int:
    """The most that this process has held so far: Linux counts it in KiB."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take_three_steps(values: dict[str, Any]) -> tuple[dict[str, Any], Any, tuple[int, int]]:
    """On a rank: the metrics of the third step, this rank's weights after it, and its memory around all."""
    before = held_bytes()
    with trainer_of(values, console=Console(file=io.StringIO())) as trainer:
        written: list[dict[str, Any]] = []
        trainer._logs.write = lambda _step, metrics: written.append(metrics)  # type: ignore[method-assign]
        for _ in range(3):
            trainer.take_step()
        with gathered_weights(trainer._wrapped):
            weights = shards_of(trainer._stages, trainer.grid)
    assert [("params_norm" in metrics) for metrics in written] == [False, False, True]
    return written[-1], weights, (before, held_bytes())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_are_those_of_the_whole_model(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, name: str, tied: bool
) -> None:
    """Of every weight once: split ones, those that ranks hold copies of, and a tied embedding on two stages."""
    ranks, parallel = LAYOUTS[name]
    values = small_run(
        tokens,
        tmp_path / "run",
        parallel=parallel,
        model={"untie_embeddings_and_output_weights": not tied},
        optimizer={"lr": 1e-2, "weight_decay": 0.5},
        logging={"norm_interval": 3, "phase_interval": None},
    )
    found = run_on_ranks(ranks, take_three_steps, values)
    weights = gather([weights for _, weights, _ in found])
    whole = torch.stack([weight.double().norm() for weight in weights.values()]).norm()
    for metrics, _, _ in found:
        assert metrics["params_norm"] == pytest.approx(whole.item(), rel=1e-6)
        least, most = (max(held) for held in zip(*(own for _, _, own in found), strict=True))
        assert least <= metrics["peak_memory_bytes"] <= most
    assert len({metrics["peak_memory_bytes"] for metrics, _, _ in found}) == 1


def test_the_peak_rate_is_that_of_all_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    config = config_from_dict(small_run("tokens", Path("run"), precision={"dtype": "bf16"}))
    one, four = (SimpleNamespace(device="cuda", world_size=size) for size in (1, 4))
    assert peak_flops_per_second(config, one) == 989.4e12  # type: ignore[arg-type]
    assert peak_flops_per_second(config, four) == 4 * 989.4e12  # type: ignore[arg-type]


# -- sources


@pytest.mark.parametrize(("skipped", "seen"), [([4], (3, 9)), ([5], (4, 9)), ([11], (4, 10))])
def test_a_skipped_step_is_left_out_once(skipped: list[int], seen: tuple[int, int]) -> None:
    """Of a source that has a sample in each step: counted after steps 4 and 10."""
    sources: Any = SourceCounter.__new__(SourceCounter)
    sources._config, sources._train, sources._skipped_steps = (
        config_from_dict(small_run("tokens", Path("run"))),
        None,
        skipped,
    )
    sources._names, sources._step, sources._former = ["a"], 0, {}
    sources._samples, sources._epoch_samples = np.zeros(1, np.int64), np.ones(1)
    sources._count_samples = lambda first, last: np.array([last - first + 1])
    counted = tuple(sources.totals_after(step)["a"]["tokens"] / SEQ_LENGTH for step in (4, 10))
    assert counted == seen


# -- stragglers


def take_ten_steps(seconds: list[float], stages: int) -> tuple[dict[int, dict[str, float]], list[str]]:
    """The reports, by step, and what is logged of steps in which each rank computes for so many seconds."""
    now, logged = [0.0], list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fanformer.train.callbacks")
    logger.addHandler(handler)
    reports = {}
    parallel = ParallelConfig(pipeline_model_parallel_size=stages)
    try:
        with rank_grid(parallel, "cpu") as grid, mock.patch.object(time, "perf_counter", lambda: now[0]):
            config = SimpleNamespace(finalize_model_grads_func=lambda wait: now.append(now.pop() + wait))
            stragglers = Stragglers([SimpleNamespace(config=config)], grid, interval=5)
            for step in range(1, 11):
                stragglers.begin_step(step)
                now[0] += seconds[grid.rank] * (100 if step == 7 else 1)  # a moment's disturbance
                config.finalize_model_grads_func(max(seconds) - seconds[grid.rank])
                if report := stragglers.after_step(step, is_skipped=False):
                    reports[step] = report
    finally:
        logger.removeHandler(handler)
    return reports, logged


def test_the_slow_rank_is_named_by_what_it_does_before_the_others_wait(run_on_ranks: RunOnRanks) -> None:
    (reports, lines), (others, nothing) = run_on_ranks(2, take_ten_steps, [0.5, 2.0], 1)
    assert list(reports) == [5, 10] and reports == others and nothing == []
    for report in reports.values():
        assert report["slowest_rank"] == 1
        assert report["work_seconds/slowest"] == pytest.approx(2.0)
        assert report["work_seconds/median"] == pytest.approx(1.25)
    assert len(lines) == 2 and all("rank 1 holds" in line and "4 times the median" in line for line in lines)


def test_a_rank_is_held_against_its_own_stage(run_on_ranks: RunOnRanks) -> None:
    """The second stage takes twice as long; in the first, one rank takes a fifth longer than the other."""
    (reports, lines), *_ = run_on_ranks(4, take_ten_steps, [1.0, 1.2, 2.0, 2.1], 2)
    assert reports[5]["slowest_rank"] == 1 and lines == []
