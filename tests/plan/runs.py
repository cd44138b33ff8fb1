"""Configurations of tiny models in large worlds, and jobs to ask the formulas about."""

from pathlib import Path
from typing import Any

from megatron_fanformer.model.config import FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.job import Job
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.config import RunConfig, config_from_dict
from megatron_fanformer.train.optimizers import OPTIMIZERS
from tests.small_runs import small_run

# Sizes that no padding fits by itself: the FAN bias has 48 rows, the vocabulary 250 ids.
MODEL = dict(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=104,
    num_attention_heads=4,
    vocab_size=250,
    make_vocab_size_divisible_by=8,
    seq_length=32,
)


def run_config(
    model: dict[str, Any] | None = None,
    *,
    samples: int = 8,
    micro_batch_size: int = 2,
    dtype: str = "bf16",
    kernels: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **parallel: Any,
) -> RunConfig:
    """A run of the tiny model; `samples` are those of a step."""
    return config_from_dict(
        {
            "model": {**MODEL, **(model or {})},
            "parallel": parallel,
            "kernels": {"transformer_impl": "local", **(kernels or {})},
            "precision": {"dtype": dtype},
            "data": {"train_data": ["none"], **(data or {})},
            "optimizer": optimizer or {},
            "schedule": {"lr_warmup_iters": 1},
            "training": {
                "run_dir": "none",
                "train_iters": 10,
                "global_batch_size": samples,
                "micro_batch_size": micro_batch_size,
            },
        }
    )


def small_config(**sections: dict[str, Any]) -> RunConfig:
    """A small run whose files do not exist."""
    return config_from_dict(small_run("no-tokens", Path("no-run"), **sections))


def job_of(model: FANformerConfig, parallel: ParallelConfig, dtype: Any = "fp32", **fields: Any) -> Job:
    """Local layers on CPUs, two samples in each of two micro batches; as many replicas as stated, else one."""
    local: dict[str, Any] = {
        "kernels": KernelsConfig(transformer_impl="local"),
        "precision": PrecisionConfig(dtype=dtype),
        "optimizer": OPTIMIZERS["adamw"],
        "data_parallel_size": parallel.resolve_data_parallel_size(None),
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "layers": "local",
        "on_cpu": True,
    }
    return Job(model=model, parallel=parallel, **{**local, **fields})


def engine_job_of(model: FANformerConfig, parallel: ParallelConfig, **fields: Any) -> Job:
    """Transformer Engine's layers on GPUs, in bf16."""
    return job_of(model, parallel, "bf16", **{"layers": "transformer_engine", "on_cpu": False, **fields})
