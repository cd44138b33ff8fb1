"""Every layout of a four-layer model against one process, in float32, for each FAN placement."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_fanformer.errors import InputError
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.parity.run import ParityResult, trial_of
from megatron_fanformer.parity.shrinking import shrink
from megatron_fanformer.parity.trial import Samples
from megatron_fanformer.parity.verb import ParityConfig, read_layouts
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.parity.test_parity import compare, write_config

# Relative, whatever the calibrated bounds say.
FIRST_LOSS = 1e-6
GRADIENTS = 1e-5  # norm of the difference over the norm
LOSSES = 1e-5

# Combinations that neither the planted faults' layouts nor the golden losses have; four ranks each.
COMBINED = ("tp=2,cp=2", "tp=2,pp=2,sp=true", "pp=2,dp=2,recompute=selective")
LAYOUTS = (
    "tp=2",
    "tp=4",
    "tp=2,sp=true",
    "tp=2,sp=true,fan=sequence",
    "pp=2",
    "pp=4",
    "pp=2,vpp=2",
    "cp=2",
    "tp=2,cp=2",
    "dp=2",
    "dp=2,distributed_optimizer=true",
    "dp=2,distributed_optimizer=true,overlap=true",
    "tp=2,pp=2",
    "tp=2,pp=2,sp=true",
    "pp=2,dp=2,recompute=full",
    "pp=2,dp=2,recompute=selective",
)
FAN_RECOMPUTED = (
    "tp=2,sp=true,recompute=selective,recompute_modules=[fan]",
    "tp=2,sp=true,fan=sequence,recompute=selective,recompute_modules=[core_attn,layernorm,mlp,fan]",
)
MORE_FAN_RECOMPUTED = (
    "recompute=selective,recompute_modules=[fan]",
    "tp=2,cp=2,sp=true,recompute=selective,recompute_modules=[fan]",
    "tp=2,pp=2,vpp=2,recompute=selective,recompute_modules=[fan]",
    "tp=2,dp=2,distributed_optimizer=true,overlap=true,recompute=selective,recompute_modules=[layernorm,fan]",
)
MORE_LAYOUTS = (
    "pp=2,num_layers_in_first_pipeline_stage=6",
    "tp=2,sp=true,cp=2,fan=sequence",
    "tp=2,pp=2,vpp=2,sp=true,fan=sequence",
    "pp=2,vpp=2,dp=2,distributed_optimizer=true,overlap=true",
    "cp=2,dp=2,distributed_optimizer=true",
    "tp=2,cp=2,pp=2,sp=true,recompute=full",
    "tp=2,dp=2,distributed_optimizer=true,overlap=true,recompute=selective",
)
SCALED_POSITIONS = ("tp=2", "tp=2,sp=true,fan=sequence", "pp=2", "pp=2,vpp=2,recompute=full", "cp=2", "tp=2,cp=2")
WITHIN_DOCUMENTS = (
    "tp=2",
    "tp=2,sp=true,fan=sequence",
    "pp=2",
    "pp=2,vpp=2,recompute=full",
    "dp=2",
    "cp=4,cp_comm_type=a2a",
    "tp=2,sp=true,cp=2,cp_comm_type=a2a,recompute=selective",
    "cp=2,pp=2,vpp=2,cp_comm_type=a2a",
)
BY_HEADS = ("cp=2,cp_comm_type=a2a", "cp=2,cp_comm_type=a2a,recompute=full", "tp=2,cp=2,cp_comm_type=a2a")
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
PLACEMENTS: dict[str, dict[str, object]] = {
    "qkv": {},
    "qk_and_v": {"placement": "qk_and_v", "v_p_ratio": 0.125},
    "none": {"placement": "none"},
    "ffn": {"placement": "ffn", "activation": "gelu"},
}


def legal(layouts: tuple[str, ...], placement: str) -> tuple[str, ...]:
    """Without those of the `sequence` form, which FAN layers in place of the MLP have not."""
    return tuple(layout for layout in layouts if placement != "ffn" or "fan=sequence" not in layout)


@pytest.fixture(params=list(PLACEMENTS))
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config_file(placement: str, tmp_path: Path) -> Path:
    return write_config(tmp_path, model={"preset": "fanformer-1b", "fan": PLACEMENTS[placement]})


def assert_close(result: ParityResult, first_loss: float = FIRST_LOSS) -> None:
    result.check()
    for layout in result.layouts:
        found = layout.differences
        assert found.losses[0] <= first_loss, layout.name
        assert max(found.tensors["gradients"].values()) <= GRADIENTS, layout.name
        assert max(found.losses) <= LOSSES, layout.name


@pytest.mark.full  # four ranks a layout; the golden losses of every run have pairs of degrees
def test_combined_layouts_for_two_steps(long_pool: RankPool, tmp_path: Path) -> None:
    assert_close(compare(long_pool, write_config(tmp_path), *COMBINED, steps=2))


@pytest.mark.parametrize(
    ("placement", "activation"),
    [
        ("qk_and_v", "gelu"),
        *(pytest.param(*of, marks=pytest.mark.full) for of in (("qkv", "none"), ("qkv", "gelu"), ("qk_and_v", "none"))),
    ],
)
def test_fan_recomputed_for_two_steps(rank_pool: RankPool, tmp_path: Path, placement: str, activation: str) -> None:
    fan = {"placement": placement, "activation": activation}
    file = write_config(tmp_path, model={"preset": "fanformer-1b", "fan": fan})
    assert_close(compare(rank_pool, file, *FAN_RECOMPUTED, steps=2))


@pytest.mark.full  # angles are made in one place, which tests/model/test_rope_scaling.py holds in each run
def test_scaled_positions_for_two_steps(long_pool: RankPool, tmp_path: Path) -> None:
    """Frequencies and the softmax's scale are those of YaRN on every stage, and its positions on every chunk."""
    file = write_config(tmp_path, model={"preset": "fanformer-1b", "rope_scaling": YARN})
    assert_close(compare(long_pool, file, *SCALED_POSITIONS, steps=2))


@pytest.mark.parametrize(
    "layouts",
    [
        ("tp=2", "dp=2,distributed_optimizer=true"),
        pytest.param(
            ("tp=2,sp=true,fan=sequence", "pp=2", "cp=2,distributed_optimizer=true", "dp=2", "pp=2,vpp=2", *COMBINED),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("tp=2,dp=2,distributed_optimizer=true", "tp=2,sp=true,dp=2,fan=sequence,distributed_optimizer=true"),
            marks=pytest.mark.full,
        ),
    ],
    ids=" ".join,
)
def test_muon_norms_of_heads_and_z_loss_for_two_steps(
    long_pool: RankPool, tmp_path: Path, layouts: tuple[str, ...]
) -> None:
    """The norms' gradients are sums over the heads of all ranks; bytes as by formula."""
    optimizer = {"name": "muon", "lr": 1e-3, "clip_grad": 0.1}
    model = {"preset": "fanformer-1b", "qk_layernorm": True, "num_query_groups": 8}
    training = {"run_dir": str(tmp_path), "train_iters": 10, "global_batch_size": 32, "z_loss_coefficient": 1e-2}
    file = write_config(tmp_path, model=model, training=training, optimizer=optimizer)
    assert_close(compare(long_pool, file, *layouts, steps=2, communication=True))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("adamw", ("tp=2", "dp=2,distributed_optimizer=true")),
        pytest.param(
            "adamw",
            ("pp=2", "dp=2,distributed_optimizer=false", "cp=2", "tp=2,sp=true,fan=sequence", "pp=2,vpp=2", *COMBINED),
            marks=pytest.mark.full,
        ),
        pytest.param("muon", ("tp=2", "dp=2,distributed_optimizer=true", "pp=2,dp=2"), marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_moments_in_bf16_for_four_steps(
    long_pool: RankPool, tmp_path: Path, name: str, layouts: tuple[str, ...]
) -> None:
    """What the second step rounds otherwise shows in the third's weights."""
    optimizer = {"name": name, "lr": 1e-3, "clip_grad": 0.1, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    result = compare(long_pool, write_config(tmp_path, optimizer=optimizer), *layouts, steps=4)
    assert_close(result)


@pytest.mark.full
def test_every_layout_for_two_steps(long_pool: RankPool, config_file: Path, placement: str) -> None:
    assert_close(compare(long_pool, config_file, *legal(LAYOUTS, placement), steps=2))


@pytest.mark.full
@pytest.mark.parametrize("layouts", [LAYOUTS[first : first + 4] for first in range(0, len(LAYOUTS), 4)], ids=" ".join)
def test_every_layout_for_a_hundred_steps(long_pool: RankPool, tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """For the paper's placement; the others' layers differ in what two steps show already."""
    assert_close(compare(long_pool, write_config(tmp_path), *layouts, steps=100))


@pytest.mark.full
def test_fan_recomputed_in_more_layouts(long_pool: RankPool, tmp_path: Path) -> None:
    assert_close(compare(long_pool, write_config(tmp_path), *MORE_FAN_RECOMPUTED, steps=2))


@pytest.mark.full  # within documents each run has one
def test_heads_for_parts_of_the_sequence(long_pool: RankPool, tmp_path: Path) -> None:
    assert_close(compare(long_pool, write_config(tmp_path), *BY_HEADS, steps=2, communication=True))


@pytest.mark.full
def test_more_combinations(long_pool: RankPool, config_file: Path, placement: str) -> None:
    assert_close(compare(long_pool, config_file, *legal(MORE_LAYOUTS, placement), steps=5))


APART: dict[str, dict[str, object]] = {
    "documents": {"train_data": ["none"], "reset_attention_mask": True},
    "chats": {"train_data": ["none"], "format": "sft"},
}


def within_documents(folder: Path, data: str = "documents") -> Path:
    """Two samples a micro batch: they are one row then, of which a rank's part ends within a sample."""
    training = {"run_dir": str(folder), "train_iters": 10, "global_batch_size": 32, "micro_batch_size": 2}
    return write_config(folder, data=APART[data], training=training)


@pytest.mark.full
@pytest.mark.parametrize("data", APART)
def test_attention_within_documents_for_two_steps(long_pool: RankPool, tmp_path: Path, data: str) -> None:
    assert_close(compare(long_pool, within_documents(tmp_path, data), *WITHIN_DOCUMENTS, steps=2))


def test_of_chats_answers_are_learned_and_micro_batches_have_unequal_numbers_of_tokens(tmp_path: Path) -> None:
    config = ParityConfig(file=within_documents(tmp_path, "chats"), layouts=("dp=2",))
    run, named = read_layouts(config)
    small = shrink(run.model, run.training.micro_batch_size, [layout.parallel for layout in named.values()])
    trial = trial_of(config, run, small, "cpu")
    samples = Samples(trial, Reordering(trial.model, trial.global_batch_size, 0))
    learned = []
    for number in range(trial.global_batch_size):
        mask, documents = samples[number]["loss_mask"], samples[number]["document_ids"]
        ends = torch.cat([documents[1:] != documents[:-1], torch.ones(1, dtype=torch.bool)])
        begins = (mask[1:] > mask[:-1]) & ~ends[:-1]
        assert not mask[ends].any()
        assert begins.sum() <= documents[-1] + 1  # one answer of a conversation
        learned.append(int(mask.sum()))
    micro = torch.tensor(learned).view(-1, trial.micro_batch_size).sum(1)
    assert micro[0] == 0 and len(micro.unique()) == len(micro)


def test_a_layout_that_cannot_keep_attention_within_documents(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layout 'cp=2': data\.reset_attention_mask with .*cp_comm_type to a2a"):
        read_layouts(ParityConfig(file=within_documents(tmp_path), layouts=("cp=2",)))


@pytest.fixture(scope="module")
def long_pool() -> Iterator[RankPool]:
    with RankPool(job_seconds=900) as pool:
        yield pool
