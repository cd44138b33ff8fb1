"""FAN attention in hybrid stacks: with a gated delta net between, which megatron-core has in PyTorch.

HybridModel comes with megatron-core 0.19.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fanformer.model.build import transformer_config
from megatron_fanformer.model.stages import HAS_HYBRID_MODEL
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.optimizer import build_optimizer
from megatron_fanformer.train.schedule import build_scheduler
from megatron_fanformer.train.step import train_step, wrap_stages
from tests.tiny import tiny_model
from tests.train.layouts import CONSTANT, RECIPE, gather, layout, set_weights, shards_of, stream_batches

pytestmark = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel comes with megatron-core 0.19")

SAME = 1e-5
MODEL = tiny_model(hidden_size=64, ffn_hidden_size=128, vocab_size=128, seq_length=64)
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
STEPS = 4
STREAM = torch.randint(MODEL.vocab_size, (4, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(1))


def trained(
    pattern: str, parallel: ParallelConfig, weights: dict[str, torch.Tensor] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps on one batch, by a HybridModel, and its shards before them."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.gated_delta_net import common

    from megatron_fanformer.model.hybrid_spec import stack_spec

    # Without the library of its kernels the delta net refuses to be built, though the deterministic one is its own, but
    # for the norm of queries and keys.
    with_kernels = mock.patch.multiple(common, HAVE_FLA=True, l2norm=partial(torch.nn.functional.normalize, dim=-1))
    deterministic = mock.patch.dict(os.environ, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
    with rank_grid(parallel, "cuda") as grid, with_kernels, deterministic:
        seed_everything(0)
        config = transformer_config(MODEL, parallel, grid, torch.float32)
        config = dataclasses.replace(
            config,
            num_layers=len(pattern),
            deterministic_mode=True,
            init_method=drawn,
            output_layer_init_method=drawn,
            embedding_init_method=drawn,
            **DELTA_NET,
        )
        stage = HybridModel(
            config=config,
            hybrid_stack_spec=stack_spec(),
            vocab_size=MODEL.padded_vocab_size,
            max_sequence_length=MODEL.seq_length,
            hybrid_layer_pattern=pattern,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            pg_collection=grid.groups,
        )
        if weights is not None:
            set_weights([stage], grid, weights)
        before = shards_of([stage], grid)
        wrapped = wrap_stages([stage], parallel)
        optimizer = build_optimizer(RECIPE, wrapped)
        build_scheduler(CONSTANT, optimizer, RECIPE, train_iters=STEPS).step(1)
        return [
            train_step(wrapped, optimizer, stream_batches(STREAM, grid), grid, 2).loss for _ in range(STEPS)
        ], before


def drawn(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.1)


def test_a_gated_delta_net_between(run_on_engine_ranks: Callable[..., list[Any]]) -> None:
    ((one, before),) = run_on_engine_ranks(1, trained, "G*-", layout())
    whole = gather([before])
    assert any(".fan." in name for name in whole) and any("A_log" in name for name in whole)
    # Without sequence parallelism megatron-core does not sum the gradient of the delta net's own norm.
    for losses, _ in run_on_engine_ranks(2, trained, "G*-", layout("tp=2,sp=true"), whole):
        assert losses == pytest.approx(one, rel=SAME)
    assert one[-1] < one[0] - 100 * SAME * one[0]
