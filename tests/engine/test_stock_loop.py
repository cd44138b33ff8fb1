"""Megatron-LM's own training loop with our layer spec, over the stand-in: its losses are those of our trainer.

The loop comes with megatron-core 0.19 (Python 3.12).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.megatron_lm import LEFT_OUT
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.runtime.parallel import ParallelConfig
from megatron_fanformer.train.config import RunConfig, config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.engine.test_whole_processes import STAND_IN
from tests.small_runs import small_run, write_tokens
from tests.stock_megatron import HAS_TRAINING, SPEC, STACK_SPEC, command_line, pretrain
from tests.train.test_trainer import train
from tests.whole_models import read_full_tensors

pytestmark = pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training comes with megatron-core 0.19")

STEPS = 5
SAME_WEIGHTS = 1e-3  # of a weight's norm; two weights drawn anew differ by 1.4 of it
SAME = 1e-5  # nats, in float32: seven digits are logged of a loss of 4.6, and layers are the Engine's and local ones


def run_by_stock(
    run: RunConfig, parallel: ParallelConfig, *flags_of_its_own: str, spec: list[str] = SPEC
) -> dict[int, float]:
    """Losses by step of our run, by Megatron's loop in another layout: its flags, data, and our initial weights."""
    optimizer, training = run.optimizer, run.training
    values = {
        "lr": optimizer.lr,
        "lr-decay-style": run.schedule.lr_decay_style,
        "weight-decay": optimizer.weight_decay,
        "adam-beta1": optimizer.adam_beta1,
        "adam-beta2": optimizer.adam_beta2,
        "adam-eps": optimizer.adam_eps,
        "clip-grad": optimizer.clip_grad,
        "global-batch-size": training.global_batch_size,
        "train-iters": training.train_iters,
        "seed": training.seed,
        "fanformer-seed": training.seed,
        "data-path": run.data.train_data[0],
        "split": "100,0,0",
        "make-vocab-size-divisible-by": run.model.make_vocab_size_divisible_by // parallel.tensor_model_parallel_size,
        "distributed-backend": "gloo",
    }
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, **STAND_IN}
    return pretrain(
        [*command_line(run.model, parallel, spec, has_engine=True), *flags, *flags_of_its_own],
        environment,
        ranks=parallel.tensor_model_parallel_size,
    )


@pytest.fixture(scope="module")
def our_run(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of our trainer with local layers, in one process; the embedding, which Megatron decays, is not."""
    folder = tmp_path_factory.mktemp("stock")
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
        schedule={"lr_decay_style": "constant", "lr_warmup_iters": 0},
        training={"train_iters": STEPS},
    )
    run_on_ranks(1, train, values)
    return config_from_dict(values)


@pytest.mark.parametrize(
    ("spec", "tensor_parallel", "sequence_parallel"),
    [
        (SPEC, 1, False),
        (STACK_SPEC, 2, True),
        pytest.param(SPEC, 2, True, marks=pytest.mark.full),
        pytest.param(SPEC, 2, False, marks=pytest.mark.full),
        pytest.param(STACK_SPEC, 1, False, marks=pytest.mark.full),
    ],
)
def test_stock_megatron_trains_as_we_do(
    our_run: RunConfig, spec: list[str], tensor_parallel: int, sequence_parallel: bool, tmp_path: Path
) -> None:
    """What it saves at the end, `convert` reads: weights that are ours but for what five steps make of rounding."""
    parallel = ParallelConfig(tensor_model_parallel_size=tensor_parallel, sequence_parallel=sequence_parallel)
    saving = ("--save", str(tmp_path / "stock"), "--save-interval", str(STEPS), "--ckpt-format", "torch_dist")
    losses = run_by_stock(our_run, parallel, *saving, spec=spec)
    expected = {metrics["step"]: metrics["loss"] for metrics in read_metrics(Path(our_run.training.run_dir))}
    assert list(expected) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(expected, abs=SAME, rel=0)
    assert expected[STEPS] < expected[1] - 100 * SAME
    _, *notes = convert_checkpoint(tmp_path / "stock", tmp_path / "converted", to="megatron")
    assert notes == [LEFT_OUT]
    ours, converted = (
        read_full_tensors(find_checkpoint(run)) for run in (our_run.training.run_dir, tmp_path / "converted")
    )
    assert converted.keys() == ours.keys()
    for name, weight in ours.items():
        difference = torch.linalg.vector_norm(converted[name] - weight)
        assert difference <= SAME_WEIGHTS * torch.linalg.vector_norm(weight), name
