"""The seconds of a step: by hand for collectives, pipelines and overlap; against the formulas of FLOPs and bytes."""

import dataclasses
from typing import Any

import pytest

from megatron_fanformer.model.config import FANConfig, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.gradient_buffers import first_stage_buckets
from megatron_fanformer.plan.job import Job, training_flops_per_token
from megatron_fanformer.plan.machines import Link, Machine
from megatron_fanformer.plan.matrix_updates import MatrixUpdates, Term
from megatron_fanformer.plan.step_time import FLASH_BACKWARD, StepTime, step_time, term_seconds
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizers import OPTIMIZERS
from tests.plan.runs import engine_job_of

ENDLESS = 1e30
LAYER = ("matrix products", "attention", "element-wise")
MODEL = FANformerConfig(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    vocab_size=32_000,
    seq_length=2048,
    untie_embeddings_and_output_weights=True,
)
PLAIN = Machine(  # nothing takes time but products, at 10^12 FLOP/s
    name="plain",
    memory_bytes=1 << 30,
    fp32_flops_per_second=1e12,
    bf16_flops_per_second=1e12,
    fp8_flops_per_second=2e12,
    product_efficiency=1.0,
    attention_efficiency=1.0,
    memory_bytes_per_second=ENDLESS,
    memory_efficiency=1.0,
    layer_seconds=0.0,
    step_seconds=0.0,
    collective_seconds=0.0,
    domain_size=8,
    domain=Link(bytes_per_second=ENDLESS, efficiency=1.0),
    network=Link(bytes_per_second=ENDLESS, efficiency=1.0),
    overlap=1.0,
    relative_error=0.0,
    sources=[],
)


def job(
    *,
    model: FANformerConfig = MODEL,
    dp: int = 1,
    micro_batches: int = 8,
    precision: dict[str, Any] | None = None,
    **layout: Any,
) -> Job:
    short = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    kernels = {name: layout.pop(name) for name in ("cuda_graph_impl", "attention_backend") if name in layout}
    return engine_job_of(
        model,
        ParallelConfig(**{short.get(name, name): value for name, value in layout.items()}),
        kernels=KernelsConfig(**kernels),
        precision=PrecisionConfig(**{"dtype": "bf16", **(precision or {})}),
        data_parallel_size=dp,
        micro_batch_size=1,
        num_micro_batches=micro_batches,
    )


def layer_seconds(time: StepTime, layers: int) -> float:
    return sum(time.parts[name] for name in LAYER) / layers


def test_rings_by_hand() -> None:
    link, network = Link(bytes_per_second=200, efficiency=0.5), Link(bytes_per_second=20, efficiency=0.5)
    machine = dataclasses.replace(PLAIN, domain=link, network=network, collective_seconds=10, domain_size=8)

    def seconds(kind: str, ranks: int, stride: int) -> float:
        return term_seconds(Term("", kind, "", 1000), ranks, stride, machine)

    assert seconds("all-gather", 4, 1) == pytest.approx(10 + 3 / 4 * 1000 / 100)
    assert seconds("all-reduce", 4, 1) == pytest.approx(10 + 2 * 3 / 4 * 1000 / 100)
    # Every fourth rank: two of the group in a domain, so two adapters of 10 bytes a second.
    assert seconds("reduce-scatter", 4, 4) == pytest.approx(10 + 3 / 4 * 1000 / 20)
    assert seconds("reduce-scatter", 4, 8) == pytest.approx(10 + 3 / 4 * 1000 / 10)
    assert seconds("all-to-all", 16, 1) == pytest.approx(10 + 15 / 16 * 1000 / 10)  # through each rank's adapter
    assert seconds("send", 2, 4) == pytest.approx(10 + 1000 / 100)
    assert seconds("send", 2, 8) == pytest.approx(10 + 1000 / 10)
    assert seconds("all-gather", 1, 1) == 0


@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, fan=FANConfig(placement="none"))])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"tp": 4, "sequence_parallel": True}])
def test_only_flops_take_time_where_nothing_else_does(model: FANformerConfig, layout: dict[str, Any]) -> None:
    asked = job(model=model, **layout)
    parts = step_time(asked, PLAIN).parts
    flash = (1 + FLASH_BACKWARD) / 3  # what attention computes for each FLOP that counts
    counted = parts["matrix products"] + parts["loss head"] + parts["attention"] / flash
    ranks = asked.world_size
    assert counted * 1e12 * ranks == pytest.approx(training_flops_per_token(model) * asked.tokens_per_step)


def test_a_pipeline_of_uneven_stages() -> None:
    whole = step_time(job(micro_batches=1), PLAIN)
    layer, head = layer_seconds(whole, 8), whole.parts["loss head"]
    # Stages of 3, 2 and 3 layers; the last has the head, too, and decides.
    layout = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3}
    time = step_time(job(pp=3, micro_batches=9, **layout), PLAIN)
    assert time.parts["pipeline bubble"] == pytest.approx(3 * layer + 2 * layer)
    assert time.seconds == pytest.approx(9 * (3 * layer + head) + 5 * layer)


@pytest.mark.parametrize(
    ("chunks", "micro_batches", "exchanges"),
    [
        (None, 8, 1 + 8),
        (2, 8, 1 + 0.25 * 2 * 8),  # a quarter is not hidden beside the other chunk's computation
    ],
)
def test_sends(chunks: int | None, micro_batches: int, exchanges: float) -> None:
    link = Link(bytes_per_second=1e9, efficiency=1.0)
    machine = dataclasses.replace(PLAIN, domain=link, overlap=0.75)
    asked = job(pp=2, micro_batches=micro_batches, virtual_pipeline_model_parallel_size=chunks)
    time = step_time(asked, machine)
    one_way = MODEL.seq_length * MODEL.hidden_size * 2 / 1e9
    assert time.parts["pipeline sends"] == pytest.approx(exchanges * 2 * one_way)


def test_replicas_communicate_beside_the_last_backward() -> None:
    machine = dataclasses.replace(PLAIN, domain=Link(bytes_per_second=1e12, efficiency=1.0), overlap=0.5)
    size = dict(ddp_bucket_size=10_000_000)
    plain, hidden = (
        step_time(job(dp=2, micro_batches=1, overlap_grad_reduce=on, overlap_param_gather=on, **size), machine)
        for on in (False, True)
    )
    buckets = first_stage_buckets(MODEL, ParallelConfig(overlap_grad_reduce=True, **size), 2, layers=8)
    exposed = 1 - 0.5 * (buckets - 1) / buckets  # the backward is long enough for half of all but one bucket
    for name, element_bytes in {"gradient reduction": 4, "weight gathering": 2}.items():
        assert plain.parts[name] == pytest.approx(MODEL.num_parameters * element_bytes / 2 / 1e12, rel=1e-3)
        assert hidden.parts[name] == pytest.approx(exposed * plain.parts[name])


def test_attention_is_plain_in_the_engine_alone() -> None:
    """Where it is asked for, and in float32, which has no other; the local layers' takes no notice."""

    def attention(dtype: str = "bf16", backend: str = "auto", layers: Any = "transformer_engine") -> float:
        asked = job(precision={"dtype": dtype}, attention_backend=backend)
        return step_time(dataclasses.replace(asked, layers=layers), PLAIN).parts["attention"]

    flash, plain = attention(), attention(backend="unfused")
    assert plain / flash == pytest.approx(2 * 3 / (1 + FLASH_BACKWARD))  # the masked half too, each product once
    assert attention("fp32") == attention("fp32", "unfused") == plain
    assert {attention(*each, "local") for each in (("bf16", "auto"), ("bf16", "unfused"), ("fp32", "auto"))} == {flash}


def test_full_recomputation_is_a_forward_more() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, again = step_time(job(), PLAIN), step_time(job(**full), PLAIN)
    forward = plain.parts["matrix products"] / 3 + plain.parts["attention"] / (1 + FLASH_BACKWARD)
    assert again.parts["recomputation"] == pytest.approx(forward)
    some = {**full, "recompute_method": "block", "recompute_num_layers": 3}
    assert step_time(job(**some), PLAIN).parts["recomputation"] == pytest.approx(3 / 8 * forward)


def test_the_optimizer_is_sharded() -> None:
    machine = dataclasses.replace(PLAIN, memory_bytes_per_second=1e12)
    one, four = step_time(job(), machine).parts["optimizer"], step_time(job(dp=4), machine).parts["optimizer"]
    weights = MODEL.num_parameters
    assert one == pytest.approx(weights * (4 + 16 + 12 + 2) / 1e12)
    assert four == pytest.approx(weights * (4 + (16 + 12 + 2) / 4) / 1e12)


def test_small_layers_wait_for_the_host() -> None:
    machine = dataclasses.replace(PLAIN, layer_seconds=1e6)
    waiting, graphs = (step_time(job(micro_batches=2, cuda_graph_impl=name), machine) for name in ("none", "local"))
    assert waiting.seconds - waiting.parts["loss head"] == pytest.approx(8 * 2 * 1e6)
    assert "host" not in graphs.parts


def test_fp8_leaves_the_fan_map_and_the_head_alone() -> None:
    plain, fp8, all_fp8 = (
        step_time(job(precision=precision), PLAIN)
        for precision in ({}, {"fp8": "hybrid"}, {"fp8": "hybrid", "fp8_fan": True})
    )
    fan = MODEL.fan_rows * MODEL.hidden_size
    others = MODEL.qkv_rows * MODEL.hidden_size + MODEL.hidden_size**2 + 3 * MODEL.hidden_size * MODEL.ffn_hidden_size
    assert fp8.parts["matrix products"] / plain.parts["matrix products"] == pytest.approx(
        (fan + others / 2) / (fan + others)
    )
    assert all_fp8.parts["matrix products"] == pytest.approx(plain.parts["matrix products"] / 2)
    assert fp8.parts["loss head"] == plain.parts["loss head"]


def test_muon_multiplies_in_its_own_format_whatever_weights_are_in() -> None:
    parts = []
    for on_cpu in (False, True):
        asked = dataclasses.replace(job(), optimizer=OPTIMIZERS["muon"], on_cpu=on_cpu)
        flops = MatrixUpdates(asked, 0).busiest_flops
        time = step_time(asked, dataclasses.replace(PLAIN, fp32_flops_per_second=0.5e12))
        parts.append(time.parts["orthogonalization"] * 1e12 / flops)
    assert parts == pytest.approx([1, 2])
