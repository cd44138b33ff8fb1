"""Jobs to ask the formulas about."""

from typing import Any

from megatron_fanformer.model.config import FANformerConfig, PrecisionConfig
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.plan.job import Job
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizers import OPTIMIZERS


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
