"""Phase health: of a single process by plain formulas, in layouts by a single process; planted faults are told."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_fanformer.train.phase_health import COARSE_PHASE, DEAD_SPREAD, PhaseHealth
from tests.small_runs import RunOnRanks, small_run, trainer_of

FOLLOWS_GRADIENTS = {"adam_eps": 1e-2}
"""AdamW's first update is almost the gradient's sign, which rounding decides where the gradient is small: the phases of
the second step then differ by 3e-5 between layouts. With this they differ by 2e-6."""

QK_AND_V = {"model": {"num_layers": 4, "fan": {"placement": "qk_and_v", "v_p_ratio": 0.125}}}
NO_LINEAR_ROWS = {"model": {"fan": {"placement": "qk_and_v", "p_ratio": 0.5}}}
PLACEMENTS: dict[str, dict[str, Any]] = {"qkv": {}, "qk_and_v": QK_AND_V, "no linear rows": NO_LINEAR_ROWS}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
    "cp2": {"context_parallel_size": 2},
    "dp2-overlap": {"data_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "pp2-interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "recompute-fan": {"recompute_granularity": "selective", "recompute_modules": ["fan"]},
}


def run_values(tokens: str, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Two steps of four layers; the second one is read."""
    model = {"num_layers": 4, **sections.pop("model", {})}
    logged = {"tensorboard": False, "phase_interval": 2, **sections.pop("logging", {})}
    training = {"run_dir": str(folder), "train_iters": 2, "global_batch_size": 4, "micro_batch_size": 1}
    sections |= {"schedule": {"lr_warmup_iters": 0}, "optimizer": FOLLOWS_GRADIENTS | sections.get("optimizer", {})}
    return small_run(tokens, folder, model=model, logging=logged, training=training, **sections)


def take_steps(values: dict[str, Any], change: Callable[[list[Any]], None] = lambda _: None) -> dict[str, Any]:
    """On a rank: the metrics of each step, what is read, and p | g of every layer in the last."""
    with trainer_of(values, console=Console(file=io.StringIO())) as trainer:
        change(trainer._stages)
        written: list[dict[str, Any]] = []
        trainer._logs.write = lambda _step, metrics: written.append(metrics)  # type: ignore[method-assign]
        seen: dict[int, list[torch.Tensor]] = {}
        maps: dict[int, torch.Tensor] = {}
        phases: Any = next(callback for callback in trainer._callbacks if isinstance(callback, PhaseHealth))
        for attention in phases._attentions:
            number = attention.layer_number - 1

            def keep(module: Any, _: Any, output: Any, number: int = number) -> None:
                maps[number] = module.weight.detach().clone()
                seen.setdefault(number, []).append(output[0].detach().flatten(0, 1).clone())

            attention.fan.linear.register_forward_hook(keep)
        sums: list[Any] = []
        reduce_over_ranks = phases._reduce_over_ranks
        phases._reduce_over_ranks = lambda: sums.append(reduce_over_ranks()) or sums[-1]
        while not trainer._is_over:
            seen.clear()
            trainer.take_step()
    return {"metrics": written, "sums": sums, "seen": seen, "maps": maps}


def health(metrics: dict[str, Any]) -> dict[str, list[float]]:
    return {name.removeprefix("health/"): value for name, value in metrics.items() if name.startswith("health/")}


@pytest.fixture(scope="module")
def alone(
    run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory, tokens: str
) -> Callable[[str], dict[str, Any]]:
    """A single process' steps, of a placement."""
    made: dict[str, dict[str, Any]] = {}

    def steps(placement: str) -> dict[str, Any]:
        if placement not in made:
            values = run_values(tokens, tmp_path_factory.mktemp(placement) / "run", **PLACEMENTS[placement])
            [made[placement]] = run_on_ranks(1, take_steps, values)
        return made[placement]

    return steps


@pytest.mark.parametrize(
    ("placement", "periodic"),
    [("qkv", [(0, 8)]), ("qk_and_v", [(0, 8), (24, 28)]), ("no linear rows", [(0, 16), (16, 32)])],
)
def test_a_single_process_has_what_plain_formulas_say(
    alone: Callable[[str], dict[str, Any]], placement: str, periodic: list[tuple[int, int]]
) -> None:
    steps = alone(placement)
    assert health(steps["metrics"][0]) == {}
    found = health(steps["metrics"][1])
    assert set(map(len, found.values())) == {4}
    for layer, micro_batches in steps["seen"].items():
        assert len(micro_batches) == 4
        pre, weight = torch.cat(micro_batches), steps["maps"][layer].double()
        columns = [column for first, end in periodic for column in range(first, end)]
        phases = pre[:, columns].double().numpy()
        assert found["phase_rms"][layer] == pytest.approx(np.sqrt(np.square(phases).mean()), rel=1e-6)
        assert found["phase_max"][layer] == np.abs(phases).max()
        spread = np.sqrt(np.cos(phases).var(0) + np.sin(phases).var(0))
        assert found["dead_units"][layer] == (spread < DEAD_SPREAD).mean()
        assert found["coarse_units"][layer] == (np.abs(phases).max(0) >= COARSE_PHASE).mean()
        others = [row for row in range(len(weight)) if row not in columns]
        assert found["periodic_weight_norm"][layer] == pytest.approx(weight[columns].norm().item(), rel=1e-12)
        assert found["linear_weight_norm"][layer] == pytest.approx(weight[others].norm().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        *((name, "qkv") for name in LAYOUTS),
        *(pytest.param(name, "qk_and_v", marks=pytest.mark.full) for name in ("tp2-sequence", "cp2")),
    ],
)
def test_every_layout_has_what_a_single_process_has(
    run_on_ranks: RunOnRanks, alone: Callable[[str], Any], tokens: str, tmp_path: Path, name: str, placement: str
) -> None:
    """Each phase counts once."""
    values = run_values(tokens, tmp_path / "run", parallel=LAYOUTS[name], **PLACEMENTS[placement])
    ranks = 1 if name.startswith("recompute") else 2
    steps, expected = run_on_ranks(ranks, take_steps, values)[0], alone(placement)
    ((sums, largest),), ((expected_sums, expected_largest),) = steps["sums"], expected["sums"]
    assert sums[:, -2].tolist() == [largest.shape[1] * 4 * 16] * 4  # samples of 16 tokens
    torch.testing.assert_close(largest, expected_largest, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=64 * 1e-6)  # sums over 64 tokens
    if ranks == 1:
        assert torch.equal(sums, expected_sums) and torch.equal(largest, expected_largest)


@torch.no_grad()
def plant(stages: list[Any]) -> None:
    """A unit of layer 1 that no token moves, and one of layer 2 far from zero."""
    layers = stages[0].decoder.layers
    for layer, bias in ((1, 2.0), (2, 40.0)):
        linear = layers[layer].self_attention.fan.linear
        linear.bias[3] = bias
    layers[1].self_attention.fan.linear.weight[3] = 0.0


def test_a_dead_unit_and_a_large_phase_are_found(run_on_ranks: RunOnRanks, tokens: str, tmp_path: Path) -> None:
    values = run_values(tokens, tmp_path / "run", logging={"phase_interval": 1}, optimizer={"lr": 1e-5})
    [steps] = run_on_ranks(1, take_steps, values, plant)
    for metrics in steps["metrics"]:
        found = health(metrics)
        assert found["dead_units"] == [0, 1 / 8, 0, 0] and found["coarse_units"] == [0, 0, 1 / 8, 0]
        assert found["phase_max"][2] == pytest.approx(40, abs=8)
