"""The memory formula: states against real tiny models, whole steps against simulated ranks, the Engine's layers against
published measurements."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.gradient_buffers import chunks, weights
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_memory import LayerShapes, core_attention
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
from megatron_fanformer.train.optimizers import OPTIMIZERS
from megatron_fanformer.train.step import wrap_stages
from tests.plan.drawn import draw
from tests.plan.runs import engine_job_of, job_of, run_config
from tests.plan.simulated_rank import PEAK_TOLERANCE, run_rank
from tests.tiny import tiny_model
from tests.train.layouts import layout

RunOnRanks = Callable[..., list[Any]]

FAR_FROM_PADDED = tiny_model(hidden_size=64, ffn_hidden_size=104, vocab_size=250, make_vocab_size_divisible_by=8)


# -- what stays from step to step


def held_states(job: Job) -> tuple[int, dict[str, int]]:
    """This rank's stage, and the bytes of what a real model and its optimizer hold."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision.dtype]
    with rank_grid(job.parallel, "cpu") as grid:
        seed_everything(0)
        stages = wrap_stages(
            build_stages(job.model, job.parallel, grid, dtype=dtype, seed=None),
            job.parallel,
            grad_reduce_in_fp32=job.precision.grad_reduce_in_fp32,
        )
        is_sharded = job.parallel.use_distributed_optimizer
        optimizer: Any = build_optimizer(OptimizerConfig(), stages)
        updated = [weight for group in optimizer.param_groups for weight in group["params"]]
        buffers = [buffer for stage in stages for buffer in stage.buffers]
        weights = [weight for stage in stages for weight in stage.parameters()]
        elements = sum(weight.numel() for weight in updated)
        return grid.groups.pp.rank(), {
            "weights": sum(
                (buffer.param_data.nbytes for buffer in buffers) if is_sharded else (w.nbytes for w in weights)
            ),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "main weights": 0 if dtype == torch.float32 else sum(weight.nbytes for weight in updated),
            "moments": 2 * 4 * elements,
        }


STATE_JOBS = {
    "dp": job_of(FAR_FROM_PADDED, layout("dp=2"), "bf16"),
    "dp, plain, fp32": job_of(FAR_FROM_PADDED, layout("dp=2,distributed_optimizer=false")),
    "dp, buckets": job_of(FAR_FROM_PADDED, layout("dp=2,overlap=true,ddp_bucket_size=6000"), "bf16"),
    "pp, tied": job_of(FAR_FROM_PADDED, layout("pp=2"), "bf16"),
    "dp in two instances": job_of(FAR_FROM_PADDED, layout("dp=2,num_distributed_optimizer_instances=2"), "bf16"),
    "dp, bf16 gradients": job_of(
        FAR_FROM_PADDED, layout("dp=2"), precision=PrecisionConfig(dtype="bf16", grad_reduce_in_fp32=False)
    ),
}


@pytest.mark.parametrize("name", STATE_JOBS)
def test_states_are_those_of_real_models_to_the_byte(name: str, run_on_ranks: RunOnRanks) -> None:
    job = STATE_JOBS[name]
    (stage, first), (other_stage, other) = run_on_ranks(2, held_states, job)
    assert rank_memory(job, stage).lines.items() >= {k: v for k, v in first.items() if v}.items()
    if job.data_parallel_size == 1:
        assert rank_memory(job, other_stage).lines.items() >= {k: v for k, v in other.items() if v}.items()
    else:  # the parts of the two replicas differ by padding alone
        assert abs(first["moments"] - other["moments"]) <= 8 * 128 * 20


def test_moments_are_those_of_each_kind_of_weight() -> None:
    """Muon keeps one of a matrix, and two of norms, biases and embeddings."""
    job = job_of(FAR_FROM_PADDED, layout(), "bf16", optimizer=OPTIMIZERS["muon"])
    (chunk,) = chunks(job.model, job.parallel, 0)
    held = weights(job.model, job.parallel, chunk)
    expected = sum(weight.elements * job.optimizer.state_bytes(weight.name, weight.dimensions) for weight in held)
    assert rank_memory(job, 0).lines["moments"] == expected


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
        formula = rank_memory(simulated.job, stage)
        error = formula.total_bytes / simulated.peak_bytes - 1
        assert abs(error) <= PEAK_TOLERANCE, (stage, formula)


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


def test_moments_in_bf16_are_those_that_a_simulated_rank_holds() -> None:
    """Beside one with moments in float32, to the byte: its peak is that much lower."""
    parallel = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    both = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    for rank in (0, 4):  # of each stage
        short, exact = (
            run_rank(run_config(**parallel, dtype="fp32", optimizer=each), world_size=8, rank=rank)
            for each in (both, {})
        )
        lines, exact_lines = (rank_memory(found.job, found.stage).lines for found in (short, exact))
        assert exact.peak_bytes - short.peak_bytes == exact_lines["moments"] - lines["moments"] > 0


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
    """The linear rows' output of each token: half as many as the width, at a p_ratio of a quarter."""
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
