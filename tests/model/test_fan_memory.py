"""What an attention layer keeps for backward, counted by storage: with FAN, with FAN recomputed, and without FAN."""

from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.runtime.layout import FANForm
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.tiny import tiny_model

HIDDEN, TOKENS, SAMPLES, FLOAT = 64, 16, 2, 4
ALL_TOKENS = TOKENS * SAMPLES
NONE = FANConfig(placement="none")


class Case(NamedTuple):
    """A layer, and how many numbers it keeps per token beyond a Transformer's, on one of T ranks."""

    fan: FANConfig
    form: FANForm
    kept: Any
    """T -> numbers."""
    kept_if_recomputed: Any


# P 16, G 32: p | g is 48 wide. A Transformer's V is a view of queries, keys and values together and keeps all of them,
# 3 h / T; at qk_and_v V is made apart, and the other two are not kept.
APART = 2 * HIDDEN
CASES = {
    "column": Case(FANConfig(), "column", lambda _: HIDDEN, lambda t: 48 / t),
    "column, gelu": Case(FANConfig(activation="gelu"), "column", lambda _: HIDDEN + 32, lambda t: 48 / t),
    "column, own values": Case(
        FANConfig(placement="qk_and_v"),
        "column",
        lambda t: 2 * HIDDEN - (HIDDEN + APART) / t,
        lambda t: (96 - APART) / t,
    ),
    "sequence": Case(FANConfig(), "sequence", lambda t: HIDDEN / t, lambda t: 48 / t),
    "sequence, gelu": Case(FANConfig(activation="gelu"), "sequence", lambda t: (HIDDEN + 32) / t, lambda t: 48 / t),
    "sequence, own values": Case(
        FANConfig(placement="qk_and_v"), "sequence", lambda t: (2 * HIDDEN - APART) / t, lambda t: (96 - APART) / t
    ),
}


def kept_bytes(fan: FANConfig, form: FANForm, *, recompute: bool) -> tuple[int, torch.Tensor]:
    """Bytes that one rank's attention keeps from forward to backward, and the gradient of its input."""
    ranks = torch.distributed.get_world_size()
    parallel = ParallelConfig(
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        fan_form=form,
        recompute_granularity="selective" if recompute else None,
        recompute_modules=["fan"],
    )
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        model = tiny_model(hidden_size=HIDDEN, num_layers=1, seq_length=TOKENS, fan=fan)
        (stage,) = build_stages(model, parallel, grid, dtype=torch.float32, seed=1)
        attention, angles = stage.decoder.layers[0].self_attention, stage.rotary_pos_emb(TOKENS)
        whole = torch.randn(TOKENS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(2))
        x_sbh = whole.chunk(ranks)[grid.groups.tp.rank()].clone().requires_grad_()
        storages: dict[int, Any] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output, _ = attention(x_sbh, attention_mask=None, rotary_pos_emb=angles)
        weights = {weight.untyped_storage()._cdata for weight in attention.parameters()}
        kept = sum(storage.nbytes() for number, storage in storages.items() if number not in weights)
        output.square().sum().backward()
        assert x_sbh.grad is not None
        return kept, x_sbh.grad


def kept_by_all(names: list[str]) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Without and with recomputation; and by a Transformer."""
    kept = {
        name: [kept_bytes(case.fan, case.form, recompute=recompute) for recompute in (False, True)]
        for name, case in CASES.items()
        if name in names
    }
    return {**kept, "Transformer": [kept_bytes(NONE, "column", recompute=False)]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_kept_is_the_formulas_to_the_byte(run_on_ranks: Any, ranks: int) -> None:
    names = [name for name, case in CASES.items() if ranks > 1 or case.form == "column"]
    for found in run_on_ranks(ranks, kept_by_all, names):
        ((transformers, _),) = found.pop("Transformer")
        for name, ((kept, gradient), (kept_if_recomputed, same_gradient)) in found.items():
            case = CASES[name]
            assert kept - transformers == ALL_TOKENS * FLOAT * case.kept(ranks), name
            assert kept_if_recomputed - transformers == ALL_TOKENS * FLOAT * case.kept_if_recomputed(ranks), name
            assert torch.equal(gradient, same_gradient), name
