"""Every layout of a four-layer model against one process, in float32, for each FAN placement."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.parity.run import ParityResult
from megatron_fanformer.parity.verb import ParityConfig, read_layouts
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.parity.test_parity import compare, write_config

# Relative, whatever the calibrated bounds say.
FIRST_LOSS = 1e-6
GRADIENTS = 1e-5  # norm of the difference over the norm
LOSSES = 1e-5


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TWO = ("tp=2", "dp=2,distributed_optimizer=true")
PAIRS = ("tp=2,sp=true,fan=sequence", "pp=2", "pp=2,vpp=2", "cp=2", "dp=2")
# Combinations that neither the planted faults' layouts nor the golden losses have; four ranks each.
COMBINED = ("tp=2,cp=2", "tp=2,pp=2,sp=true", "pp=2,dp=2,recompute=selective")
LAYOUTS = words("""
    tp=2 tp=4 tp=2,sp=true tp=2,sp=true,fan=sequence pp=2 pp=4 pp=2,vpp=2 cp=2 tp=2,cp=2 dp=2
    dp=2,distributed_optimizer=true dp=2,distributed_optimizer=true,overlap=true tp=2,pp=2 tp=2,pp=2,sp=true
    pp=2,dp=2,recompute=full pp=2,dp=2,recompute=selective
""")
FAN_RECOMPUTED = (
    "tp=2,sp=true,recompute=selective,recompute_modules=[fan]",
    "tp=2,sp=true,fan=sequence,recompute=selective,recompute_modules=[core_attn,layernorm,mlp,fan]",
)
MORE_FAN_RECOMPUTED = words("""
    recompute=selective,recompute_modules=[fan] tp=2,cp=2,sp=true,recompute=selective,recompute_modules=[fan]
    tp=2,pp=2,vpp=2,recompute=selective,recompute_modules=[fan]
    tp=2,dp=2,distributed_optimizer=true,overlap=true,recompute=selective,recompute_modules=[layernorm,fan]
""")
MORE_LAYOUTS = words("""
    pp=2,num_layers_in_first_pipeline_stage=6 tp=2,sp=true,cp=2,fan=sequence tp=2,pp=2,vpp=2,sp=true,fan=sequence
    pp=2,vpp=2,dp=2,distributed_optimizer=true,overlap=true cp=2,dp=2,distributed_optimizer=true
    tp=2,cp=2,pp=2,sp=true,recompute=full tp=2,dp=2,distributed_optimizer=true,overlap=true,recompute=selective
""")
SCALED_POSITIONS = ("tp=2", "tp=2,sp=true,fan=sequence", "pp=2", "pp=2,vpp=2,recompute=full", "cp=2", "tp=2,cp=2")
WITHIN_DOCUMENTS = words("""
    tp=2 tp=2,sp=true,fan=sequence pp=2 pp=2,vpp=2,recompute=full dp=2 cp=4,cp_comm_type=a2a
    tp=2,sp=true,cp=2,cp_comm_type=a2a,recompute=selective cp=2,pp=2,vpp=2,cp_comm_type=a2a
""")
BOTH = words("tp=2,dp=2,distributed_optimizer=true tp=2,sp=true,dp=2,fan=sequence,distributed_optimizer=true")
BY_HEADS = ("cp=2,cp_comm_type=a2a", "cp=2,cp_comm_type=a2a,recompute=full", "tp=2,cp=2,cp_comm_type=a2a")
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
PLACEMENTS: dict[str, dict[str, object]] = {
    "qkv": {},
    "qk_and_v": {"placement": "qk_and_v", "v_p_ratio": 0.125},
    "none": {"placement": "none"},
    "ffn": {"placement": "ffn", "activation": "gelu"},
}


MODEL = {"preset": "fanformer-1b"}
TRAINING = {"run_dir": "none", "train_iters": 10, "global_batch_size": 32}
# The norms' gradients are sums over the heads of all ranks.
MUON = {
    "model": {**MODEL, "qk_layernorm": True, "num_query_groups": 8, "rope_scaling": YARN},
    "training": {**TRAINING, "z_loss_coefficient": 1e-2},
    "optimizer": {"name": "muon", "lr": 1e-3, "clip_grad": 0.1},
}
# Two samples a micro batch: they are one row then, of which a rank's part ends within a sample.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "data": {"train_data": ["none"], "reset_attention_mask": True},
    "training": {**TRAINING, "micro_batch_size": 2},
}


def in_bf16(name: str) -> dict[str, object]:
    return {"name": name, "lr": 1e-3, "clip_grad": 0.1, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def full(*values: object, name: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.full, id=name)


def assert_close(result: ParityResult) -> None:
    result.check()
    for layout in result.layouts:
        differences = layout.differences
        assert differences is not None and differences.losses[0] <= FIRST_LOSS, layout.name
        assert max(differences.tensors["gradients"].values()) <= GRADIENTS, layout.name
        assert max(differences.losses) <= LOSSES, layout.name


@pytest.fixture(scope="module")
def long_pool() -> Iterator[RankPool]:
    with RankPool(job_seconds=900) as pool:
        yield pool


@pytest.mark.parametrize(
    ("sections", "layouts", "steps"),
    [
        pytest.param(
            {"model": {**MODEL, "fan": {"placement": "qk_and_v", "activation": "gelu"}}}, FAN_RECOMPUTED, 2, id="fan"
        ),
        # What the second step rounds otherwise shows in the third's weights.
        pytest.param({"optimizer": in_bf16("adamw")}, TWO, 4, id="moments in bf16"),
        full({}, COMBINED, 2, name="combined"),  # the golden losses of every run have pairs of degrees
        full({}, (*MORE_FAN_RECOMPUTED, *FAN_RECOMPUTED), 2, name="fan in more layouts"),
        full({"model": {**MODEL, "fan": {"activation": "gelu"}}}, FAN_RECOMPUTED, 2, name="fan with gelu"),
        full({"model": {**MODEL, "fan": {"placement": "qk_and_v"}}}, FAN_RECOMPUTED, 2, name="fan of values"),
        # Frequencies and the softmax's scale are those of YaRN on every stage, and its positions on every chunk.
        full({"model": {**MODEL, "rope_scaling": YARN}}, SCALED_POSITIONS, 2, name="scaled positions"),
        full({"optimizer": in_bf16("adamw")}, (*PAIRS, *COMBINED), 4, name="moments in bf16 in more layouts"),
        full({"optimizer": in_bf16("muon")}, (*TWO, "pp=2,dp=2"), 4, name="Muon's in bf16"),
        pytest.param(MUON, (*TWO, "pp=2"), 2, id="Muon, norms of heads, z-loss, YaRN"),
        full(MUON, (*PAIRS, *COMBINED, *BOTH), 2, name="Muon in more layouts"),
        full({}, BY_HEADS, 2, name="heads for parts of the sequence"),  # within documents each run has one
        full(DOCUMENTS, WITHIN_DOCUMENTS, 2, name="within documents"),
        *(full({}, LAYOUTS[at : at + 4], 100, name=f"a hundred steps, from {at}") for at in range(0, len(LAYOUTS), 4)),
    ],
)
def test_layouts_of_a_configuration(
    long_pool: RankPool, tmp_path: Path, sections: dict[str, Any], layouts: tuple[str, ...], steps: int
) -> None:
    assert_close(compare(long_pool, write_config(tmp_path, **sections), *layouts, steps=steps))


@pytest.mark.full
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("layouts", "steps"), [(LAYOUTS, 2), (MORE_LAYOUTS, 5)])
def test_every_layout(
    long_pool: RankPool, tmp_path: Path, placement: str, layouts: tuple[str, ...], steps: int
) -> None:
    file = write_config(tmp_path, model={**MODEL, "fan": PLACEMENTS[placement]})
    # FAN layers in place of the MLP have no `sequence` form.
    legal = [layout for layout in layouts if placement != "ffn" or "fan=sequence" not in layout]
    assert_close(compare(long_pool, file, *legal, steps=steps))


def test_a_layout_that_cannot_keep_attention_within_documents(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layout 'cp=2': data\.reset_attention_mask with .*cp_comm_type to a2a"):
        read_layouts(ParityConfig(file=write_config(tmp_path, **DOCUMENTS), layouts=("cp=2",)))
