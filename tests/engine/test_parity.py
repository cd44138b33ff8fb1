"""Every layout with Transformer Engine's layers against one process with the local ones; planted faults are caught."""

from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.parity.run import ParityResult
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.engine.faults import CONTEXT, ENGINE, ENGINE_FAULTS, FAULTS_IN_BF16, OUTSIDE_LAYERS, faulty_trial
from tests.parity import test_matrix
from tests.parity.test_parity import Comparison, compare, write_config

# In each run, beside those that faults in layers are planted in.
LAYOUTS = (
    "recompute=selective,recompute_modules=[fan]",
    "fused_single_qkv_rope=true",
    "pp=2,vpp=2",
    "tp=2,gradient_accumulation_fusion=true",
)
MORE_LAYOUTS = (
    "gradient_accumulation_fusion=true",
    "recompute=full",
    "recompute=selective",
    "tp=4",
    "pp=4",
    "tp=2,pp=2,sp=true",
    "tp=2,pp=2,vpp=2,sp=true,fan=sequence",
    "dp=2,distributed_optimizer=true,overlap=true,gradient_accumulation_fusion=true",
    "pp=2,dp=2,recompute=full",
    "tp=2,sp=true,recompute=selective",
    "tp=2,sp=true,recompute=selective,recompute_modules=[fan,core_attn,mlp]",
    "tp=2,sp=true,fan=sequence,recompute=selective,recompute_modules=[layernorm,fan]",
    "tp=2,sp=true,fan=sequence,recompute=selective,gradient_accumulation_fusion=true",
)
BY_HEADS = (
    "cp=4,cp_comm_type=a2a",
    "cp=2,cp_comm_type=a2a,recompute=selective",
    "tp=2,sp=true,cp=2,cp_comm_type=a2a,fan=sequence",
    "cp=2,pp=2,vpp=2,cp_comm_type=a2a,recompute=full",
    "cp=2,dp=2,cp_comm_type=a2a,distributed_optimizer=true",
)
BF16_LAYOUTS = (
    "tp=2",
    "tp=2,sp=true,fan=sequence",
    "dp=2,distributed_optimizer=true",
    "cp=2,cp_comm_type=a2a",
    "cp=2,cp_comm_type=all_gather",
    "cp=4",
    "tp=2,cp=2,sp=true",
    "cp=2,pp=2",
    "pp=2,vpp=2",
    "cp=2,dp=2,distributed_optimizer=true",
)
ON_ENGINE = {"device": "cuda", "transformer_impl": "local"}  # of the single process; layouts name the Engine's


def on_engine(layouts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{layout},{ENGINE}" for layout in layouts)


def compare_on_engine(pool: RankPool, file: Path, layouts: tuple[str, ...], **options: Any) -> ParityResult:
    return compare(pool, file, *on_engine(layouts), **ON_ENGINE, **options)


def assert_close(result: ParityResult) -> None:
    """As layouts of the local layers, but for the first loss: by other formulas, it has other last places."""
    result.check()
    for layout in result.layouts:
        assert layout.differences is not None
        assert max(layout.differences.tensors["gradients"].values()) <= test_matrix.GRADIENTS, layout.name
        assert max(layout.differences.losses) <= test_matrix.LOSSES, layout.name


@pytest.fixture(scope="module")
def comparison(engine_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    file, others = write_config(tmp_path_factory.mktemp("parity")), on_engine(LAYOUTS)
    return Comparison(engine_pool, file, ENGINE_FAULTS, faulty_trial, others, **ON_ENGINE)


@pytest.fixture(scope="module")
def bf16_comparison(engine_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    file = write_config(tmp_path_factory.mktemp("bf16"))
    return Comparison(engine_pool, file, FAULTS_IN_BF16, faulty_trial, dtype="bf16", **ON_ENGINE)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in OUTSIDE_LAYERS else ()) for n in ENGINE_FAULTS]
)
def test_a_planted_fault_is_caught_and_named(comparison: Comparison, name: str) -> None:
    comparison.assert_caught(name)


def test_layouts_without_a_fault_are_the_same(comparison: Comparison) -> None:
    in_layers = {fault.layout for name, fault in ENGINE_FAULTS.items() if name not in OUTSIDE_LAYERS}
    replicas = ENGINE_FAULTS["updated weights not gathered"].layout
    assert_close(comparison.of(*sorted({*in_layers, replicas, *on_engine(LAYOUTS)})))


@pytest.mark.full  # plain stages and replicas: in each run they are interleaved, and with the distributed optimizer
def test_layouts_of_the_other_faults_are_the_same(comparison: Comparison) -> None:
    assert_close(comparison.of(*sorted({ENGINE_FAULTS[name].layout for name in OUTSIDE_LAYERS})))


@pytest.mark.full  # angles are made in one place
def test_scaled_positions_are_the_same(engine_pool: RankPool, tmp_path: Path) -> None:
    """By the Engine's own rotation, which knows no factor of cos and sin, of queries and keys apart and in one."""
    file = write_config(tmp_path, model={"preset": "fanformer-1b", "rope_scaling": test_matrix.YARN})
    assert_close(compare_on_engine(engine_pool, file, ("tp=2,sp=true", "fused_single_qkv_rope=true"), steps=2))


def test_context_parallelism_and_a_fault_in_it(bf16_comparison: Comparison) -> None:
    bf16_comparison.of(*bf16_comparison.layouts).check()
    bf16_comparison.assert_caught(CONTEXT)


@pytest.mark.parametrize("layouts", [BY_HEADS[:1], pytest.param(BY_HEADS[1:], marks=pytest.mark.full)], ids=" ".join)
def test_context_parallelism_by_heads_within_documents(
    engine_pool: RankPool, tmp_path: Path, layouts: tuple[str, ...]
) -> None:
    """By the Engine's variable-length attention, without its context parallelism; a document is on several ranks."""
    assert_close(compare_on_engine(engine_pool, write_config(tmp_path, **test_matrix.DOCUMENTS), layouts, steps=2))


@pytest.mark.full  # in bf16 by the fused kernel, which tests/engine/test_layers.py holds in each run
def test_context_parallelism_by_heads_in_bf16(engine_pool: RankPool, tmp_path: Path) -> None:
    file = write_config(tmp_path, **test_matrix.DOCUMENTS)
    compare_on_engine(engine_pool, file, BY_HEADS[:3], steps=2, dtype="bf16").check()


@pytest.mark.full
def test_context_parallelism_by_heads(engine_pool: RankPool, tmp_path: Path) -> None:
    """Of whole samples, where query, key and value may stay in one tensor until they are rotated."""
    layouts = (*BY_HEADS, "cp=2,cp_comm_type=a2a,fused_single_qkv_rope=true")
    assert_close(compare_on_engine(engine_pool, write_config(tmp_path), layouts, steps=2))
    grouped = write_config(tmp_path, model={"preset": "fanformer-1b", "num_query_groups": 8, "qk_layernorm": True})
    assert_close(compare_on_engine(engine_pool, grouped, BY_HEADS[:3], steps=2))


@pytest.mark.full  # ffn's FAN layers are local ones alone
@pytest.mark.parametrize("placement", [p for p in test_matrix.PLACEMENTS if p != "ffn"])
def test_more_layouts_of_every_placement(engine_pool: RankPool, tmp_path: Path, placement: str) -> None:
    file = write_config(tmp_path, model={"preset": "fanformer-1b", "fan": test_matrix.PLACEMENTS[placement]})
    refused = {"qkv": (), "qk_and_v": ("[fan]", "rope"), "none": ("fan",)}[placement]  # by the placement's rules
    layouts = tuple(text for text in (*LAYOUTS, *MORE_LAYOUTS) if not any(part in text for part in refused))
    assert_close(compare_on_engine(engine_pool, file, layouts))
    compare_on_engine(engine_pool, file, BF16_LAYOUTS, dtype="bf16").check()
