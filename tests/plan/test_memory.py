"""The memory formula: whole steps against simulated ranks, the Engine's layers against
published measurements."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_memory import LayerShapes, core_attention
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.train.config import RunConfig
from tests.plan.drawn import draw
from tests.plan.runs import engine_job_of, run_config
from tests.plan.simulated_rank import PEAK_TOLERANCE, run_rank
from tests.tiny import tiny_model
from tests.train.layouts import layout

RunOnRanks = Callable[..., list[Any]]

FAR_FROM_PADDED = tiny_model(hidden_size=64, ffn_hidden_size=104, vocab_size=250, make_vocab_size_divisible_by=8)


# -- whole steps, against the simulation


def large(config: RunConfig) -> RunConfig:
    """The layout with a model of such a size that it is tensors which matter, and not a step's few numbers."""
    model = dataclasses.replace(
        config.model,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=16 * config.model.ffn_hidden_size,
        seq_length=2048,
        vocab_size=50_280,
        make_vocab_size_divisible_by=128,
    )
    is_chunk_given = config.kernels.loss_head_chunk_tokens is not None
    kernels = dataclasses.replace(config.kernels, loss_head_chunk_tokens=512 if is_chunk_given else None)
    return dataclasses.replace(config, model=model, kernels=kernels)


def assert_formula_is_near(config: RunConfig, world_size: int, stages: list[int]) -> None:
    for stage in stages:
        rank = stage * world_size // config.parallel.pipeline_model_parallel_size
        simulated = run_rank(config, world_size=world_size, rank=rank)
        assert simulated.memory.total_bytes == pytest.approx(simulated.peak_bytes, rel=PEAK_TOLERANCE)


def test_a_step_is_near_the_simulated_one() -> None:
    """With a pipeline, sequence parallelism, grouped queries, and parts of a layer recomputed."""
    config = run_config(
        dict(num_layers=2, num_query_groups=2),
        samples=4,
        micro_batch_size=1,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        recompute_granularity="selective",
        recompute_modules=["core_attn", "fan"],
    )
    assert_formula_is_near(large(config), 4, [1])


SEED, LAYOUTS, WORLD = 4177, 10, 64


@pytest.mark.full
@pytest.mark.parametrize("number", range(LAYOUTS), ids=lambda number: f"seed {SEED}, layout {number}")
def test_drawn_layouts(number: int) -> None:
    """Layouts that nobody looked at while the formula was written: the first and the last stage of each."""
    generator = random.Random(f"{SEED} {number}")
    config = large(draw(SEED, number, WORLD))
    while config.joint_problems(config.parallel.data_parallel_size or 1):
        config = large(draw(generator.randrange(2**32), number, WORLD))
    assert_formula_is_near(config, WORLD, sorted({0, config.parallel.pipeline_model_parallel_size - 1}))


# -- Transformer Engine's layers, against what others measured


class Published(NamedTuple):
    """A run of SimuMax v1.2's summary for B200: Llama 3 shapes with fewer layers, GQA, SwiGLU, untied, Megatron's loss
    head; 8 GPUs, micro batches of one sample of 4,096 tokens, four of them (with 8 and 32 the same was measured)."""

    model: str
    tensor: int
    stages: int
    gibibytes: float


LLAMA_3 = {
    "70b": dict(num_layers=12, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8),
    "405b": dict(num_layers=4, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128, num_query_groups=16),
}
PUBLISHED = [
    Published("70b", 1, 2, 66.55),
    Published("70b", 2, 1, 60.68),
    Published("70b", 4, 1, 39.07),
    Published("70b", 8, 1, 28.29),
    Published("405b", 1, 2, 87.08),
    Published("405b", 2, 1, 81.59),
    Published("405b", 4, 1, 52.89),
    Published("405b", 8, 1, 38.57),
]
PUBLISHED_TOLERANCE = 0.03


def published_job(run: Published) -> Job:
    model = FANformerConfig(
        **LLAMA_3[run.model],
        vocab_size=128_256,
        seq_length=4096,
        untie_embeddings_and_output_weights=True,
        fan=FANConfig(placement="none"),
    )
    parallel = layout(f"tp={run.tensor},pp={run.stages}", sequence_parallel=run.tensor > 1)
    return engine_job_of(
        model,
        parallel,
        kernels=KernelsConfig(chunked_loss_head=False, gradient_accumulation_fusion=True),
        data_parallel_size=8 // parallel.model_parallel_size,
        micro_batch_size=1,
        num_micro_batches=4,
    )


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.model} tp {run.tensor} pp {run.stages}")
def test_published_runs_of_the_engine(run: Published) -> None:
    job = published_job(run)
    most = max(rank_memory(job, stage).total_bytes for stage in range(run.stages))
    assert most / 2**30 == pytest.approx(run.gibibytes, rel=PUBLISHED_TOLERANCE)


def test_fp8_keeps_copies_of_weights_and_smaller_activations() -> None:
    """Two 8-bit copies of every map but FAN's; half of what the MLP's maps keep of their inputs."""
    bf16 = engine_job_of(FAR_FROM_PADDED, layout())
    fp8 = dataclasses.replace(bf16, precision=PrecisionConfig(dtype="bf16", fp8="hybrid"))
    lines, lines_fp8 = rank_memory(bf16, 0).lines, rank_memory(fp8, 0).lines
    h, f, layers, tokens = 64, 104, 2, 2 * FAR_FROM_PADDED.seq_length
    assert lines_fp8["FP8 copies of weights"] == 2 * layers * (3 * h * h + h * h + 3 * h * f)
    assert lines["activations"] - lines_fp8["activations"] == layers * tokens * (h + f)


def test_a_gelu_keeps_what_it_reads() -> None:
    plain, gelu = (
        rank_memory(engine_job_of(dataclasses.replace(FAR_FROM_PADDED, fan=fan), layout()), 0).lines
        for fan in (FANConfig(), FANConfig(activation="gelu"))
    )
    layers, tokens = FAR_FROM_PADDED.num_layers, 2 * FAR_FROM_PADDED.seq_length
    assert gelu["activations"] - plain["activations"] == layers * tokens * FAR_FROM_PADDED.hidden_size // 2 * 2


def test_the_engines_context_parallelism_has_buffers() -> None:
    """Beside what a rank by itself holds for as many tokens. The ring: keys, values and their gradients twice, the
    queries' gradient. Gathered: keys, values and their gradients of all ranks; and these gradients of the rank's two
    chunks, of which one sees as much more as the other sees less.
    """
    alone, ring, gathered = (
        core_attention(LayerShapes(engine_job_of(FAR_FROM_PADDED, layout(text), micro_batch_size=samples)))
        for text, samples in (("", 1), ("cp=2", 2), ("cp=2,cp_comm_type=all_gather", 2))
    )
    row = 2 * FAR_FROM_PADDED.seq_length // 2 * FAR_FROM_PADDED.hidden_size * 2  # two samples' on a rank, [n, h]
    assert ring.backward - alone.backward == 2 * (2 * 2 * row) + row
    assert gathered.backward - alone.backward == 4 * 2 * row + 2 * (1 + 4) * row // 2  # in chunks of half a rank's
    assert ring.saved == gathered.saved  # the copy that goes round, in place of the keys and values


UNFUSED = KernelsConfig(attention_backend="unfused")


def test_attention_without_a_fused_kernel_keeps_every_score() -> None:
    """FANformer-1B, four samples of 2,048 tokens: docs/gpu.md has 8.6 GB more, as one H100 measured it."""
    fused, unfused = (
        rank_memory(engine_job_of(PRESETS["fanformer-1b"], layout(""), micro_batch_size=4, kernels=kernels), 0)
        for kernels in (KernelsConfig(), UNFUSED)
    )
    scores = 16 * 4 * 16 * 2048**2 * 2  # layers, samples, heads
    more = unfused.lines["activations"] - fused.lines["activations"]
    assert more == pytest.approx(scores, rel=5e-3)  # in place of one float32 number a row
    assert (unfused.total_bytes - fused.total_bytes) / 1e9 == pytest.approx(8.6, rel=0.03)
