"""Layouts of large worlds drawn by a seed, of all that `train` accepts."""

import random
from typing import Any

from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config

MODULES = ("core_attn", "layernorm", "mlp", "fan")


def draw(seed: int, number: int, world_size: int) -> RunConfig:
    """The number-th legal layout of a seed."""
    generator = random.Random(f"{seed} {number}")
    while True:
        config = _candidate(generator, world_size)
        if not (
            config.section_problems(exclude=["data"]) or config.joint_problems(config.parallel.data_parallel_size or 1)
        ):
            return config


def _candidate(generator: random.Random, world_size: int) -> RunConfig:
    pick = generator.choice
    tensor, context, stages = pick([1, 2, 4, 8]), pick([1, 1, 2, 4]), pick([1, 2, 4, 8])
    chunks = pick([None, None, 2, 3]) if stages > 1 else None
    layers, last_layers = ((chunks or 1) * pick([1, 2]) for _ in range(2))  # of a stage, and of the last one
    is_uneven = stages > 1 and layers != last_layers
    replicas = world_size // (tensor * context * stages)
    is_sequence_parallel = pick([False, True])
    overlap = dict(overlap_grad_reduce=pick([None, False, True]))
    if overlap["overlap_grad_reduce"] is not None:
        overlap["overlap_param_gather"] = overlap["overlap_grad_reduce"] and pick([False, True])
    micro_batch_size = pick([1, 2])
    return run_config(
        dict(
            hidden_size=256,
            num_attention_heads=8,
            ffn_hidden_size=8 * generator.randrange(20, 60),
            num_layers=layers * (stages - 1) + last_layers,
            num_query_groups=pick([None, 1, 2, 4]),
            seq_length=64,
            untie_embeddings_and_output_weights=pick([False, True]),
            qk_layernorm=pick([False, True]),
            fan=dict(placement=pick(["qkv", "qkv", "qk_and_v", "none"]), bias=pick([False, True])),
        ),
        samples=replicas * micro_batch_size * stages * pick([1, 2]),
        micro_batch_size=micro_batch_size,
        dtype=pick(["bf16", "bf16", "fp32"]),
        kernels=dict(chunked_loss_head=pick([True, True, False]), loss_head_chunk_tokens=pick([None, 24])),
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        cp_comm_type=pick([None, "a2a"]) if context > 1 else None,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        data_parallel_size=replicas,
        sequence_parallel=is_sequence_parallel,
        fan_form=pick(["column", "sequence"]) if is_sequence_parallel else "column",
        use_distributed_optimizer=pick([True, True, False]),
        ddp_bucket_size=pick([None, 100_000]),
        num_layers_in_last_pipeline_stage=last_layers if is_uneven else None,
        **overlap,
        **_recomputation(generator),
    )


def _recomputation(generator: random.Random) -> dict[str, Any]:
    granularity = generator.choice([None, "full", "selective"])
    if granularity == "full":
        return dict(
            recompute_granularity="full",
            recompute_method=generator.choice(["uniform", "block"]),
            recompute_num_layers=1,
        )
    if granularity == "selective":
        modules = generator.sample(MODULES, generator.randrange(1, 5))
        return dict(recompute_granularity="selective", recompute_modules=modules)
    return {}
