"""Stock Megatron-LM's own training loop with our layer spec, on a GPU; skipped where there is none.

The loop comes with megatron-core 0.19 (Python 3.12); `pretrain_stock.py` here starts it.
"""

import os
from pathlib import Path

import pytest

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layer_spec import transformer_engine_problem
from megatron_fanformer.runtime.parallel import ParallelConfig
from tests.gpu.making import BACKEND, needs_gpu
from tests.stock_megatron import HAS_TRAINING, SPEC, command_line, pretrain

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training comes with megatron-core 0.19"),
]

MODEL = FANformerConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=256, seq_length=32
)
STEPS = 24
STOP = 20
LEARNED = 1.0  # nats; it begins at ln 256 = 5.5, and twenty such steps on a CPU ended at 3.9


def train(spec: list[str], *flags: str) -> dict[int, float]:
    """Losses by step of a run of stock Megatron on its mock data, as its log has them."""
    has_engine = transformer_engine_problem() is None
    return pretrain(
        [
            *command_line(MODEL, ParallelConfig(), spec, has_engine=has_engine),
            *("--mock-data", "--global-batch-size", "8", "--bf16", "--train-iters", str(STEPS)),
            *("--lr", "3e-3", "--lr-decay-style", "constant", "--distributed-backend", BACKEND or "nccl"),
            *flags,
        ],
        os.environ,
    )


@pytest.mark.parametrize(
    ("spec", "flags"),
    [(SPEC, []), (["tests.model.my_fanformer", "my_layer_spec"], ["--qk-layernorm"])],
    ids=["paper", "own-module"],
)
def test_stock_megatron_trains_saves_and_goes_on(spec: list[str], flags: list[str], tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", str(STOP), "--exit-interval", str(STOP)]
    losses = train(spec, *flags, *save)
    assert max(losses) == STOP
    assert losses[STOP] < losses[1] - LEARNED
    further = train(spec, *flags, "--load", str(tmp_path))
    assert min(further) == STOP + 1
    assert max(further.values()) < losses[1] - LEARNED
