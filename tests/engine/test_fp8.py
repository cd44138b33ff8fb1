"""FP8 by Transformer Engine's layers, emulated: which products are in FP8, in every recipe and layout, and how near."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import FANConfig, PrecisionConfig
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.engine.passes import (
    LAYOUTS,
    MODEL,
    X_F_RECOMPUTED,
    Pass,
    batch,
    model_on_rank,
    one_pass,
    ranks_of,
    worst_gradient,
)
from tests.engine_on_cpu import installing
from tests.small_runs import RunOnRanks

# Against the same layout in bf16: nats, and norm of a gradient's difference over its norm. e4m3 keeps three bits and
# e5m2, in which gradients are, two: seen were at most 0.010 and 0.21.
FP8_LOSS, FP8_GRADIENT = 0.03, 0.3
PASSES_UNTIL_SCALED = 3  # `delayed` takes its scales from the passes before: they are all 1 in the first
PRODUCTS = ("TN", "NN", "NT")  # of a map: forward, input gradient, weight gradient


def precision(recipe: str, *, fp8_fan: bool = False) -> PrecisionConfig:
    return PrecisionConfig(dtype="bf16", fp8="hybrid", fp8_recipe=recipe, fp8_fan=fp8_fan)


def maps(layout: str) -> dict[str, tuple[int, int]]:
    """The shapes of a layer's weights on one rank."""
    ranks, width = ranks_of(layout), MODEL.hidden_size
    fan_ranks = 1 if "FAN" in layout else ranks
    return {
        "FAN": (MODEL.fan_rows // fan_ranks, width),
        "QKV": (MODEL.qkv_rows // ranks, width),
        "output of attention": (width, width // ranks),
        "SwiGLU, first": (2 * MODEL.ffn_hidden_size // ranks, width),
        "SwiGLU, second": (width, MODEL.ffn_hidden_size // ranks),
    }


def check(run: RunOnRanks, recipe: str, layout: str, *, fp8_fan: bool) -> None:
    given = (ranks_of(layout), one_pass, "transformer_engine", "paper", layout)
    bf16: list[Pass] = run(*given)
    passes = PASSES_UNTIL_SCALED if recipe == "delayed" else 1
    fp8: list[Pass] = run(*given, precision(recipe, fp8_fan=fp8_fan), torch.bfloat16, passes)
    for name, shape in maps(layout).items():
        is_fp8 = name != "FAN" or fp8_fan
        assert fp8[0].in_fp8[shape] == {(kind, is_fp8, is_fp8) for kind in PRODUCTS}, name
        assert bf16[0].in_fp8[shape] == {(kind, False, False) for kind in PRODUCTS}, name
    assert fp8[0].loss != bf16[0].loss
    assert fp8[0].loss == pytest.approx(bf16[0].loss, abs=FP8_LOSS, rel=0)
    assert worst_gradient(fp8, bf16) <= FP8_GRADIENT


ALWAYS = {("tensorwise", "tp2 sp, FAN sequence", True), ("delayed", "tp2", False), ("blockwise", "tp2 sp", True)}
"""Each recipe and layout of two ranks in every run; the rest is full's."""
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full)
    for case in itertools.product(("delayed", "tensorwise", "blockwise"), LAYOUTS, (False, True))
]


@pytest.mark.parametrize(("recipe", "layout", "fp8_fan"), CASES)
def test_products_in_fp8(run_on_engine_ranks: RunOnRanks, recipe: str, layout: str, fp8_fan: bool) -> None:
    check(run_on_engine_ranks, recipe, layout, fp8_fan=fp8_fan)


@pytest.fixture(scope="module")
def blackwell_pool() -> Iterator[RankPool]:
    with RankPool("cuda", backend="gloo", prepare=installing.install_blackwell) as pool:
        yield pool


@pytest.mark.full  # ranks of their own: a process has one kind of GPU
@pytest.mark.parametrize("fp8_fan", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_mxfp8(blackwell_pool: RankPool, layout: str, fp8_fan: bool) -> None:
    check(blackwell_pool.run, "mxfp8", layout, fp8_fan=fp8_fan)


# -- what is kept for backward


def saved_in_attention(recipe: str | None, placement: str) -> list[tuple[str, int, bool]]:
    """Type, numbers and whether it is X_F, of all that a self-attention's forward pass keeps."""
    given = precision(recipe) if recipe else None
    model = dataclasses.replace(MODEL, fan=FANConfig(placement=placement))
    with model_on_rank("transformer_engine", model, "one rank", given) as (stage, _):
        attention = stage.decoder.layers[0].self_attention
        forward = attention.forward
        x_f: list[int] = []
        attention.fan.register_forward_hook(lambda _m, _i, made: x_f.append(made[0].data_ptr()))
        saved: dict[tuple[int, str], int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.data_ptr(), str(tensor.dtype).removeprefix("torch.")] = tensor.numel()
            return tensor

        def watched(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return forward(*args, **kwargs)

        attention.forward = watched
        tokens, positions = batch()
        stage(tokens, positions, None, labels=tokens.roll(-1, 1))
        return [(kind, numbers, address in x_f) for (address, kind), numbers in saved.items()]


@pytest.mark.parametrize("placement", ["qkv", "qk_and_v"])
def test_x_f_is_kept_once(run_on_engine_ranks: RunOnRanks, placement: str) -> None:
    """By FAN in bf16, which QKV shares; with `delayed` each layer keeps its own copy, whose scale is of that moment.

    (There the map after attention has one, too, of the same width.)
    """
    width = 2 * MODEL.seq_length * MODEL.hidden_size
    for recipe, copies in ((None, 0), ("tensorwise", 0), ("blockwise", 0), ("delayed", 2)):
        (saved,) = run_on_engine_ranks(1, saved_in_attention, recipe, placement)
        assert len([kind for kind, _, is_x_f in saved if is_x_f and kind == "bfloat16"]) == 1
        assert len([kind for kind, numbers, _ in saved if kind == "uint8" and numbers == width]) == copies, recipe


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.full)])
def test_recomputing_x_f_changes_no_bit(run_on_engine_ranks: RunOnRanks, recipe: str) -> None:
    """QKV reads an X_F in backward that was freed and made again."""
    kept, again = (
        run_on_engine_ranks(2, one_pass, "transformer_engine", "paper", layout, precision(recipe))
        for layout in ("tp2 sp", X_F_RECOMPUTED)
    )
    assert kept[0].loss == again[0].loss
    assert worst_gradient(again, kept) == 0.0


# -- what crashed


def builds(placement: str) -> bool:
    """Norms recomputed in FP8 before a replicated FAN map: megatron-core asks attention to keep what the norm made."""
    given = precision("tensorwise", fp8_fan=True)
    layout = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    model = dataclasses.replace(MODEL, fan=FANConfig(placement=placement))
    with model_on_rank("transformer_engine", model, "tp2 sp, FAN sequence", given, **layout) as (stage, _):
        tokens, positions = batch()
        stage(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean().backward()
        return bool(stage.decoder.layers[0].self_attention.fan.linear.save_original_input)


@pytest.mark.parametrize("placement", ["qkv", "qk_and_v"])
def test_a_recomputed_norm_before_the_replicated_map(run_on_engine_ranks: RunOnRanks, placement: str) -> None:
    assert run_on_engine_ranks(2, builds, placement) == [True, True]
