"""Whole runs on Transformer Engine's layers: resumed bit for bit, checkpoints of either layers, generation."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.checkpoint.stored_files import read_table
from megatron_fanformer.model.config import KernelsConfig
from megatron_fanformer.train.metrics import read_metrics
from megatron_fanformer.train.optimizer import single_optimizers
from megatron_fanformer.train.optimizers import OptimizerConfig
from tests.checkpoint.states import Pieces, layers_for, load_and_train, small_model, training
from tests.generate.making import all_logits, cached_logits, with_model, write_checkpoint, write_tokenizer
from tests.small_runs import RunOnRanks, small_run, write_tokens
from tests.train.layouts import gather
from tests.train.test_trainer import make_runs, numbers, stored_tensors, train

SAME_LOGITS = 2e-5  # absolute, of logits of about 4, in float32

# Sizes that FP8 takes, on two ranks, too.
MODEL = {"hidden_size": 64, "ffn_hidden_size": 64}
BF16: dict[str, Any] = {"dtype": "bf16"}
DELAYED: dict[str, Any] = {"dtype": "bf16", "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "dp2, moments in bf16": {
        "parallel": {"data_parallel_size": 2},
        "precision": BF16,
        "optimizer": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    },
    "dp2, delayed, fp8_fan": {"parallel": {"data_parallel_size": 2}, "precision": {**DELAYED, "fp8_fan": True}},
    "tp2 sp, FAN sequence, tensorwise": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
        "precision": {**BF16, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    },
}
ALWAYS = ("dp2, delayed, fp8_fan",)  # an evaluation before the save, with other samples on each rank
STEPS = 6  # of two micro batches: the first half is longer than the scales' history


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.full) for n in RUNS])
def test_a_resumed_run_is_the_uninterrupted_one(run_on_engine_ranks: RunOnRanks, tmp_path: Path, name: str) -> None:
    """Losses, norms, validation, weights, the Engine's Adam and FP8's scales; gradients are added in the products."""
    tokens = write_tokens(tmp_path / "tokens")
    settings = {
        **RUNS[name],
        "model": MODEL,
        "kernels": {"transformer_impl": "transformer_engine"},
        "runtime": {"device": "cuda", "distributed_backend": "gloo"},
        "data": {"valid_data": {"random": [tokens]}},
        "training": {"eval_interval": 2, "eval_iters": 1},
    }
    runs = make_runs(run_on_engine_ranks, tmp_path, tokens, settings, steps=STEPS)
    assert len(numbers(runs.straight)) == STEPS
    assert numbers(runs.resumed) == numbers(runs.straight)
    validation = [
        [value for metrics in read_metrics(run) for key, value in metrics.items() if "random" in key]
        for run in (runs.straight, runs.resumed)
    ]
    assert len(validation[0]) >= STEPS // 2 and validation[0] == validation[1]
    checkpoints = [run / "checkpoints" / f"step-{STEPS:08d}" for run in (runs.straight, runs.resumed)]
    [straight], [resumed] = (run_on_engine_ranks(1, stored_tensors, checkpoint) for checkpoint in checkpoints)
    assert straight.keys() == resumed.keys()
    saved = read_table(checkpoints[0]).state_dict_metadata
    assert any("fp8_scales" in key for key in saved) is ("delayed" in name)
    assert [key for key in straight if not torch.equal(straight[key], resumed[key])] == []


def test_an_evaluation_leaves_no_trace_in_the_scales(run_on_engine_ranks: RunOnRanks, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    seen = []
    for interval in (1, STEPS):
        values = small_run(
            tokens,
            tmp_path / str(interval),
            precision=DELAYED,
            model=MODEL,
            kernels={"transformer_impl": "transformer_engine"},
            runtime={"device": "cuda", "distributed_backend": "gloo"},
            data={"valid_data": {"random": [tokens]}},
            training={"train_iters": STEPS, "eval_interval": interval, "eval_iters": 2},
        )
        run_on_engine_ranks(1, train, values)
        seen.append(numbers(tmp_path / str(interval)))
    assert len(seen[0]) == STEPS and seen[0] == seen[1]


# -- checkpoints of either layers


def saved_or_loaded(
    layout: str, kernels: KernelsConfig, dtype: torch.dtype, folder: Path, is_loading: bool
) -> tuple[Pieces, list[float]]:
    """Weights and optimizer saved after two steps, or loaded over others, and the losses of two steps more."""
    model, seed = small_model(num_layers=layers_for(layout)), 2 if is_loading else 1
    with training(layout, model, dtype=dtype, seed=seed, device="cuda", kernels=kernels) as run:
        save_or_load(run, folder, is_loading)
        return run.pieces(), run.take_steps(2)


def save_or_load(run: Any, folder: Path, is_loading: bool) -> None:
    if is_loading:
        run.load(folder / "checkpoints" / "step-00000002")
    else:
        run.take_steps(2)
        run.save(CheckpointSaver(folder, run.grid, keep=None))


LOCAL, ENGINE = (KernelsConfig(transformer_impl=name) for name in ("local", "transformer_engine"))


@pytest.mark.parametrize(("saved", "other"), [(LOCAL, ENGINE), (ENGINE, LOCAL)], ids=["local-first", "engine-first"])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("tp2", torch.bfloat16),
        pytest.param("fan-sequence-plain", torch.float32, marks=pytest.mark.full),
        pytest.param("vpp2", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_either_layers_loads_in_the_others(
    run_on_engine_ranks: RunOnRanks,
    tmp_path: Path,
    layout: str,
    dtype: torch.dtype,
    saved: KernelsConfig,
    other: KernelsConfig,
) -> None:
    saving = run_on_engine_ranks(2, saved_or_loaded, layout, saved, dtype, tmp_path, False)
    loading = run_on_engine_ranks(2, saved_or_loaded, layout, other, dtype, tmp_path, True)
    before, after = (gather([pieces for pieces, _ in ranks]) for ranks in (saving, loading))
    assert before.keys() == after.keys()
    assert sum("exp_avg_sq" in name for name in before) > 10
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    bound = 1e-5 if dtype == torch.float32 else 5e-3  # between implementations, of losses of about 4.6
    assert loading[0][1] == pytest.approx(saving[0][1], abs=bound, rel=0)


# -- moments in bf16


def adam_and_moments(
    recipe: OptimizerConfig, folder: Path, is_loading: bool
) -> tuple[list[str], set[torch.dtype], Pieces, list[float]]:
    """The optimizer's bases, its states' formats, the states saved after two steps or loaded, and two losses more."""
    with training(
        "dp2",
        small_model(num_layers=2),
        dtype=torch.bfloat16,
        seed=2 if is_loading else 1,
        device="cuda",
        kernels=ENGINE,
        recipe=recipe,
    ) as run:
        save_or_load(run, folder, is_loading)
        (part,) = single_optimizers(run.optimizer)
        formats = {tensor.dtype for state in part.optimizer.state.values() for tensor in state.values()}
        bases = [f"{base.__module__}.{base.__name__}" for base in type(part.optimizer).__mro__]
        return bases, formats, run.pieces(), run.take_steps(2)


def test_moments_in_bf16_are_in_the_engines_adam(
    run_on_engine_ranks: RunOnRanks, run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    """Which goes on as it was, and as ours does without the Engine."""
    recipe = OptimizerConfig(lr=1e-2, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    saved = run_on_engine_ranks(2, adam_and_moments, recipe, tmp_path, False)
    gone_on = run_on_engine_ranks(2, adam_and_moments, recipe, tmp_path, True)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    without = run_on_ranks(2, load_and_train, "dp2", small_model(num_layers=2), torch.bfloat16, checkpoint, recipe)
    for bases, formats, _, losses in (*saved, *gone_on):
        assert "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam" in bases
        assert formats == {torch.bfloat16}
        assert losses == saved[0][3]
    before, after = (gather([pieces for _, _, pieces, _ in ranks]) for ranks in (saved, gone_on))
    ours = gather([shown.pieces for shown in without])
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [name for name in before if not torch.equal(before[name], ours[name])] == []
    assert without[0].next_losses == pytest.approx(saved[0][3], abs=5e-3, rel=0)


def test_one_moment_in_bf16_is_in_our_adam(run_on_engine_ranks: RunOnRanks, tmp_path: Path) -> None:
    """The Engine's would make float32 copies of all weights' moments at once."""
    for bases, formats, *_ in run_on_engine_ranks(
        2, adam_and_moments, OptimizerConfig(exp_avg_dtype="bf16"), tmp_path, False
    ):
        assert "megatron_fanformer.train.torch_optimizers.Adam" in bases
        assert formats == {torch.bfloat16, torch.float32}


# -- generation


def test_the_cache_gives_the_logits_of_the_local_layers(
    run_on_engine_ranks: RunOnRanks, run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    ids = [[7, 99, 3, 200, 41, 5, 6, 149], [1, 2, 3, 4, 5, 6, 7, 8]]
    run_on_ranks(1, write_checkpoint, tmp_path, "fanformer-tied", write_tokenizer(tmp_path))
    (expected,) = run_on_ranks(1, with_model, tmp_path, all_logits, ids)
    on_engine = functools.partial(with_model, device="cuda")
    (whole,) = run_on_engine_ranks(1, on_engine, tmp_path, all_logits, ids)
    (cached,) = run_on_engine_ranks(1, on_engine, tmp_path, cached_logits, ids, 3)
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(expected), atol=SAME_LOGITS, rtol=0)
    torch.testing.assert_close(torch.tensor(cached), torch.tensor(expected)[:, 2:], atol=SAME_LOGITS, rtol=0)
