"""The FAN layer and the attention behind it: what is kept, what is summed, and what never stands in memory."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.fan_functions import Activation, FANActivation, FANOutput, FANShard
from megatron_fanformer.model.local_layers import TorchCoreAttention
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything
from tests.tiny import tiny_model
from tests.train.layouts import gather, layout, shards_of
from tests.train.test_step import sum_sequence_parallel_gradients

CONFIG = tiny_model(hidden_size=64, ffn_hidden_size=128, vocab_size=256, seq_length=32)


def activation(pre: torch.Tensor, periodic: int, *, gelu: bool = False) -> torch.Tensor:
    shard = FANShard(1, 0, (FANOutput(periodic, pre.shape[-1] - periodic),))
    (x_f,) = FANActivation.apply(pre, Activation(shard, None, gelu))
    return x_f


@pytest.mark.parametrize("periodic", [0, 3, 5])
@pytest.mark.parametrize("gelu", [False, True])
def test_activation_is_cos_sin_and_linear_in_that_order(periodic: int, gelu: bool) -> None:
    pre = torch.randn(7, 2, 10, requires_grad=True)
    p, g = pre[..., :periodic], pre[..., periodic:]
    expected = torch.cat([p.cos(), p.sin(), torch.nn.functional.gelu(g) if gelu else g], -1)
    x_f = activation(pre, periodic, gelu=gelu)
    torch.testing.assert_close(x_f, expected, atol=0, rtol=0)
    cotangent = torch.randn_like(x_f)
    (gradient,) = torch.autograd.grad(x_f, pre, cotangent)
    (expected_gradient,) = torch.autograd.grad(expected, pre, cotangent)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


def test_a_large_bf16_phase_is_taken_in_float32() -> None:
    phases = torch.arange(0, 4096, 16, dtype=torch.float32).bfloat16().reshape(1, 1, -1)
    x_f = activation(phases, phases.shape[-1])
    exact = torch.cat([phases.double().cos(), phases.double().sin()], -1)
    torch.testing.assert_close(x_f.double(), exact, atol=2**-8, rtol=0)  # one bf16 rounding of a value below 1


def initial_pieces(parallel: ParallelConfig, untied: bool, seed: int) -> list[Any]:
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        config = FANformerConfig(**{**CONFIG.__dict__, "untie_embeddings_and_output_weights": untied})
        (stage,) = build_stages(config, parallel, grid, dtype=torch.float32, seed=seed)
        return [
            (s.key, s.global_shape, s.global_slice(), s.data.detach().clone())
            for s in local_shards(sharded_state(stage, grid))
        ]


@pytest.mark.parametrize("untied", [False, True])
def test_initial_weights_do_not_depend_on_the_layout(run_on_ranks: Any, untied: bool) -> None:
    whole = [
        gather(run_on_ranks(2 if text else 1, initial_pieces, layout(text), untied, 7))
        for text in ("", "tp=2", "pp=2", "dp=2")
    ]
    for other in whole[1:]:
        assert other.keys() == whole[0].keys()
        for name, weight in other.items():
            assert torch.equal(weight, whole[0][name]), name
    elsewhere = gather(run_on_ranks(1, initial_pieces, ParallelConfig(), untied, 8))
    matrices = {name for name, weight in elsewhere.items() if weight.ndim == 2}
    assert {name for name, weight in elsewhere.items() if not torch.equal(weight, whole[0][name])} == matrices


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_core_attention_runs_in_a_fused_kernel(groups: int) -> None:
    """Forward and backward where torch may not fall back on the kernel that holds an s x s matrix."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0)
    core = TorchCoreAttention(config, 1, AttnMaskType.causal, "self")
    query = torch.randn(33, 2, 4, 16, requires_grad=True)
    key, value = (torch.randn(33, 2, groups, 16, requires_grad=True) for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = core(query, key, value)
        output.sum().backward()
    repeated = [x.repeat_interleave(4 // groups, 2).permute(1, 2, 0, 3) for x in (key, value)]
    scores = query.permute(1, 2, 0, 3) @ repeated[0].transpose(-1, -2) / 4
    scores = scores.masked_fill(torch.ones(33, 33, dtype=torch.bool).triu(1), -torch.inf)
    expected = (scores.softmax(-1) @ repeated[1]).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def losses_and_pieces(parallel: ParallelConfig, fields: dict[str, Any]) -> Any:
    """Token losses of the initial model of seed 3 with shaken biases, and the gradients summed as a step sums them."""
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        config = FANformerConfig(**{**CONFIG.__dict__, **fields})
        (stage,) = build_stages(config, parallel, grid, dtype=torch.float32, seed=3)
        shake_biases(stage, grid)
        tokens = torch.arange(32).unsqueeze(0)
        losses = stage(tokens, tokens, None, labels=tokens + 1)
        losses.mean().backward()
        sum_sequence_parallel_gradients(stage, grid)
        return losses.detach(), shards_of([stage], grid, gradients=True), shards_of([stage], grid)


@torch.no_grad()
def shake_biases(stage: Any, grid: Any) -> None:
    for shard in local_shards(sharded_state(stage, grid)):
        if shard.key.endswith("bias"):
            whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(len(shard.key)))
            shard.data.copy_(whole[shard.global_slice()])


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.full)])
def test_grouped_queries_over_more_ranks_than_groups(run_on_ranks: Any, groups: int) -> None:
    ((losses, gradients, _),) = run_on_ranks(1, losses_and_pieces, layout(), {"num_query_groups": groups})
    expected = gather([gradients])
    ranks = run_on_ranks(4, losses_and_pieces, layout("tp=4"), {"num_query_groups": groups})
    for rank_losses, _, _ in ranks:
        torch.testing.assert_close(rank_losses, losses, atol=1e-5, rtol=0)
    for name, gradient in gather([pieces for _, pieces, _ in ranks]).items():
        error = (gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
        assert error < 1e-4, f"{name}: {error}"


# -- the sequence form, and the values' own FAN layer


FANS = {
    "qkv": FANConfig(),
    "no bias": FANConfig(bias=False),
    "gelu": FANConfig(activation="gelu"),
    "own values": FANConfig(placement="qk_and_v"),
    "own values, own p": FANConfig(placement="qk_and_v", v_p_ratio=0.125, activation="gelu"),
}


ALWAYS = ("no bias", "own values, own p")  # with GELU; the plain one is in every test of whole runs


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, id=f"{name}-{form}", marks=() if name in ALWAYS else pytest.mark.full)
        for form in ("column", "sequence")
        for name in FANS
    ],
)
def test_both_forms_equal_the_single_rank(run_on_ranks: Any, name: str, form: Any) -> None:
    fields = {"fan": FANS[name]}
    [(losses, gradients, weights)] = run_on_ranks(1, losses_and_pieces, layout(), fields)
    ranks = run_on_ranks(2, losses_and_pieces, layout(f"tp=2,sp=true,fan={form}"), fields)
    for rank_losses, _, _ in ranks:
        torch.testing.assert_close(rank_losses, losses, atol=1e-5, rtol=0)
    expected = gather([gradients])
    whole = gather([pieces for _, pieces, _ in ranks])
    assert whole.keys() == expected.keys()
    for key, gradient in whole.items():
        assert (gradient - expected[key]).norm() <= 1e-5 * expected[key].norm(), key
    same_weights = gather([pieces for _, _, pieces in ranks])
    assert all(torch.equal(same_weights[key], weight) for key, weight in gather([weights]).items())
