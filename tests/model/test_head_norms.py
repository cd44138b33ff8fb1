"""Norms of each head of queries and keys (`qk_layernorm`), against transformers' Qwen3, which has them likewise."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fanformer.convert.name_table import convert
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import as_transformer
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.tiny import tiny_model

# Without FAN, with norms of heads, the model is a Qwen3.
QWEN3 = as_transformer(
    tiny_model(hidden_size=64, ffn_hidden_size=96, num_query_groups=2, seq_length=32, qk_layernorm=True)
)
SAME = 2e-6  # of the greatest element, in float32


def numbers_of_both() -> list[dict[str, torch.Tensor]]:
    """Logits and gradients by Qwen3's names, of our stage and of Qwen3 with the same weights."""
    with rank_grid(ParallelConfig(), "cpu") as grid:
        seed_everything(0)
        (stage,) = build_stages(QWEN3, ParallelConfig(), grid, dtype=torch.float32, seed=3)
        held = dict(stage.named_parameters())
        with torch.no_grad():
            for name, weight in held.items():
                if "layernorm" in name:  # ones by themselves
                    weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
        qwen3 = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=QWEN3.vocab_size,
                hidden_size=QWEN3.hidden_size,
                intermediate_size=QWEN3.ffn_hidden_size,
                num_hidden_layers=QWEN3.num_layers,
                num_attention_heads=QWEN3.num_attention_heads,
                num_key_value_heads=QWEN3.query_groups,
                head_dim=QWEN3.kv_channels,
                rms_norm_eps=QWEN3.layernorm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": float(QWEN3.rotary_base)},
                tie_word_embeddings=True,
            )
        )
        named = dict(convert({name: weight.detach() for name, weight in held.items()}, QWEN3, "megatron", "hf"))
        missing, unexpected = qwen3.load_state_dict(named, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        ids = torch.randint(QWEN3.vocab_size, (2, QWEN3.seq_length), generator=torch.Generator().manual_seed(1))
        theirs = qwen3(input_ids=ids).logits
        ours = stage(ids, torch.arange(QWEN3.seq_length).expand_as(ids), None)[..., : QWEN3.vocab_size]
        for logits in (ours, theirs):
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients = dict(convert({name: weight.grad for name, weight in held.items()}, QWEN3, "megatron", "hf"))
        own = {name: weight.grad for name, weight in qwen3.named_parameters()}
        return [{"logits": ours.detach(), **gradients}, {"logits": theirs.detach(), **own}]


def test_a_transformer_with_them_is_a_qwen3(run_on_ranks: Any) -> None:
    ((ours, theirs),) = run_on_ranks(1, numbers_of_both)
    assert ours.keys() == theirs.keys()
    assert {"model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"} < ours.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= SAME * value.abs().max(), name
