"""The sections `parallel` and `runtime` of a run's configuration: its layout, by Megatron's names, and its devices.

Rules that need the model's shape are in `model/layout_rules.py`.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from megatron_fanformer.errors import InputError

DeviceKind = Literal["cuda", "cpu"]
FANForm = Literal["column", "sequence"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "fan"]
DEFAULT_RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = ("core_attn",)

COUNTS = (  # fields that are at least 1, or null
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "data_parallel_size",
    "num_distributed_optimizer_instances",
    "ddp_bucket_size",
    "recompute_num_layers",
)

EMBEDDING, LAYER, LOSS = "E", "t", "L"
MOST_LAYERS = 10_000
"""The most layers that a `pipeline_model_parallel_layout` may have."""

MOVED_FIELDS = {
    "parallel.transformer_impl": "kernels.transformer_impl",
    "parallel.attention_backend": "kernels.attention_backend",
    "parallel.cross_entropy_loss_fusion": "kernels.chunked_loss_head",
    "parallel.cross_entropy_chunk_tokens": "kernels.loss_head_chunk_tokens",
    "parallel.cuda_graph_impl": "kernels.cuda_graph_impl",
    "parallel.gradient_accumulation_fusion": "kernels.gradient_accumulation_fusion",
    "parallel.device": "runtime.device",
    "parallel.threads_per_rank": "runtime.threads_per_rank",
    "parallel.deterministic_mode": "runtime.deterministic_mode",
    "parallel.distributed_timeout_minutes": "runtime.distributed_timeout_minutes",
    "runtime.cpu_shared_memory_collectives": "",
    "runtime.numa_binding": "",
    "data.staging_bytes": "",
    "data.staging_path": "",
    "data.remote": "",
    "data.reset_position_ids": "",
    "data.mask_repeated_ngrams": "",
    "data.max_repetition": "",
    "logging.csv": "",
    "logging.record_memory_history": "",
    "logging.source_interval": "",
    "logging.straggler_factor": "",
    "logging.straggler_interval": "",
    "logging.wandb_mode": "",
    "training.max_restarts": "",
    "checkpoint.fully_parallel_save": "",
    "evaluation.perplexity.batches": "",
    "evaluation.perplexity.chunking": "",
    "evaluation.perplexity.eod_id": "",
}
"""Fields of old configurations and checkpoints, with their present names; an empty name: removed."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel degrees of the model and the data."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks of layers per pipeline stage (the interleaved schedule); null: one (1F1B)."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; null: as many as the middle ones."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; null: as many as the middle ones."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of every chunk, as Megatron-LM writes them: E embedding, t layer, L loss head, and | between chunks, chunk
    0 of all stages first; t*4 and (tt|)*3 repeat. null: layers divide evenly
    (docs/parallelism.md#stages-of-your-own)."""
    context_parallel_size: int = 1
    """Ranks that share each sample's sequence."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None
    """Attention exchanges keys and values, in a ring (`p2p`, by Transformer Engine alone) or all at once
    (`all_gather`), or heads for parts of the sequence (`a2a`, which attention within documents needs); null: a ring
    with the Engine's layers, all at once with the local ones."""
    data_parallel_size: int | None = None
    """Replicas of the model; null: the world size divided by the sizes above, or 1 without a launcher's world size."""
    sequence_parallel: bool = False
    """Shard norms and residuals along the sequence over tensor-parallel ranks."""
    fan_form: FANForm = "column"
    """`column` shards the FAN map over tensor-parallel ranks; `sequence` (with `sequence_parallel`) replicates it
    (docs/parallelism.md#the-fan-map)."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    num_distributed_optimizer_instances: int = 1
    """Groups of data-parallel ranks that each have all of the optimizer's state, and shard it among themselves: weights
    are gathered within a group, and gradients summed between groups too."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients during backward; null: on GPUs with replicas."""
    overlap_param_gather: bool | None = None
    """Gather updated weights during the next forward; null: on GPUs with replicas."""
    ddp_bucket_size: int | None = None
    """Parameters per bucket of overlapped communication; null: Megatron's own choice."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: `full` layers, or `recompute_modules`."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: `uniform` keeps the input of every `recompute_num_layers` layers, `block` recomputes the first
    `recompute_num_layers` layers of a stage."""
    recompute_num_layers: int | None = None
    """With `full`: see `recompute_method`."""
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: [*DEFAULT_RECOMPUTE_MODULES])
    """With `selective`: parts of a layer; `fan` keeps p | g in place of X_F
    (docs/parallelism.md#what-fan-keeps-for-backward)."""

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def exchanges_heads(self) -> bool:
        """Return whether each context parallel rank attends over whole sequences, with its part of the heads."""
        return self.cp_comm_type == "a2a" and self.context_parallel_size > 1

    @property
    def virtual_stages(self) -> int:
        """Return the number of chunks of layers per stage, as stated or as the stated layout implies; at least 1."""
        if self.pipeline_model_parallel_layout is not None and self.virtual_pipeline_model_parallel_size is None:
            return len(layout_chunks(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size or 1
        return self.virtual_pipeline_model_parallel_size or 1

    def state_ranks(self, data_parallel_size: int) -> int:
        """Return the number of data and context parallel ranks that share an optimizer's state."""
        if not self.use_distributed_optimizer:
            return 1
        # At least one: a search also sizes layouts of fewer replicas than instances, before rules refuse them.
        return max(1, data_parallel_size * self.context_parallel_size // self.num_distributed_optimizer_instances)

    def recomputes(self, module: RecomputeModule) -> bool:
        """Return whether selective recomputation includes that part of a layer."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def resolved_overlaps(self, *, is_faster: bool) -> tuple[bool, bool]:
        """Return `overlap_grad_reduce` and `overlap_param_gather`, with a choice in place of null.

        Args:
            is_faster: whether overlap saves time: there are replicas, and they communicate without the cores that
                compute, as over NCCL.
        """
        overlaps_reduce, overlaps_gather = self.overlap_grad_reduce, self.overlap_param_gather
        if overlaps_reduce is None:
            overlaps_reduce = is_faster
        if overlaps_gather is None:
            overlaps_gather = is_faster and overlaps_reduce and self.use_distributed_optimizer
        return overlaps_reduce, overlaps_gather

    def segments(self, num_layers: int) -> list[list[int]] | None:
        """Return the number of layers of each chunk as `segments[chunk][stage]`; None if they do not divide evenly.

        Chunk 0 of all stages comes first in the model.
        """
        stages, chunks = self.pipeline_model_parallel_size, self.virtual_stages
        if self.pipeline_model_parallel_layout is not None:
            layers = [chunk.count(LAYER) for chunk in layout_chunks(self.pipeline_model_parallel_layout)]
            return [layers[start : start + stages] for start in range(0, len(layers), stages)]
        stage_layers = self.layers_per_stage(num_layers)
        if stage_layers is None or any(layers % chunks for layers in stage_layers):
            return None
        return [[layers // chunks for layers in stage_layers]] * chunks

    def layers_per_stage(self, num_layers: int) -> list[int] | None:
        """Return the layers of each pipeline stage, all its chunks together; None if they do not divide evenly."""
        if self.pipeline_model_parallel_layout is not None:
            chunks = self.segments(num_layers) or []
            return [sum(layers) for layers in zip(*chunks, strict=True)]
        first, last = (
            [] if layers is None else [layers]
            for layers in (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        )
        other_stages = self.pipeline_model_parallel_size - len(first) - len(last)
        other_layers = num_layers - sum(first) - sum(last)
        if other_stages == 0:
            return None if other_layers else first + last
        per_stage, rest = divmod(other_layers, other_stages)
        return None if other_layers < 0 or rest else [*first, *[per_stage] * other_stages, *last]

    def problems(self) -> list[str]:
        """Return the broken rules of single fields, one line each; if there are none, those between fields."""
        lines = [
            f"parallel.{name} is {value}; it must be at least 1"
            for name in COUNTS
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if lines:  # the rules between fields divide by some of them
            return lines
        between = (*self._model_parallel_problems(), *self._overlap_problems(), *self._recompute_problems())
        return [f"parallel.{problem}" for problem in between]

    def _model_parallel_problems(self) -> Iterator[str]:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield (
                "sequence_parallel is true at tensor_model_parallel_size 1, where there is nothing to shard; "
                "set it to false or raise the tensor parallel size"
            )
        if self.fan_form == "sequence" and not self.sequence_parallel:
            yield (
                "fan_form is sequence without sequence parallelism, whose parts of the sequence it runs on; set "
                "parallel.sequence_parallel to true, or fan_form to column"
            )
        if self.cp_comm_type is not None and self.context_parallel_size == 1:
            yield (
                f"cp_comm_type is {self.cp_comm_type} at context_parallel_size 1, where nothing is exchanged; set it "
                "to null, or raise the context parallel size"
            )
        pipeline = self.pipeline_model_parallel_size
        if self.pipeline_model_parallel_layout is not None:
            yield from self._layout_problems(self.pipeline_model_parallel_layout)
        elif self.virtual_stages > 1 and pipeline == 1:
            yield (
                f"virtual_pipeline_model_parallel_size is {self.virtual_stages} at pipeline_model_parallel_size 1, "
                "where there is no schedule to interleave; set it to null, or raise the pipeline parallel size"
            )
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(self, name) is not None and pipeline == 1:
                yield f"{name} is {getattr(self, name)} at pipeline_model_parallel_size 1; set it to null"

    def _layout_problems(self, text: str) -> Iterator[str]:
        start = f"pipeline_model_parallel_layout is {text!a}"
        stages, chunks = self.pipeline_model_parallel_size, layout_chunks(text)
        implied, stated = len(chunks) // stages, self.virtual_pipeline_model_parallel_size
        whole = "".join(chunks)
        if len(whole) > MOST_LAYERS or whole != f"{EMBEDDING}{LAYER * (len(whole) - 2)}{LOSS}":
            yield (
                f"{start}; it must begin with E, end with L, and have at most {MOST_LAYERS:,} layers t between, with | "
                "between chunks, as in Et*3|(t*4|)*6t*3|L"
            )
        elif not all(chunks):  # an empty chunk would output its very input, which the schedule frees as an output
            yield f"{start}, in which chunk {chunks.index('')} is empty; give it a layer t, or remove a |"
        elif len(chunks) % stages or stated not in (None, implied):
            yield (
                f"{start}, of {len(chunks)} chunks, and pipeline_model_parallel_size {stages} x "
                f"virtual_pipeline_model_parallel_size {stated or 'any'} has others; write as many, or change those"
            )
        elif stages == 1:
            yield f"{start} at pipeline_model_parallel_size 1; set it to null"
        if self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage:
            yield f"{start}, and so are num_layers_in_first_pipeline_stage or …_last_… given; set those to null"

    def _overlap_problems(self) -> Iterator[str]:
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            yield (
                "overlap_param_gather is true without use_distributed_optimizer, which alone gathers weights; set "
                "the latter to true, or the former to false"
            )
        if self.num_distributed_optimizer_instances > 1 and not self.use_distributed_optimizer:
            yield (
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances} without "
                "use_distributed_optimizer, which alone shards the state; set the latter to true, or the former to 1"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield "overlap_param_gather is true without overlap_grad_reduce, which it needs; set that to true too"

    def _recompute_problems(self) -> Iterator[str]:
        is_full = self.recompute_granularity == "full"
        if is_full and (self.recompute_method is None or self.recompute_num_layers is None):
            yield (
                "recompute_granularity is full, which needs recompute_method (uniform or block) and "
                "recompute_num_layers; set them to uniform and 1 to recompute layer by layer"
            )
        if not is_full and (self.recompute_method or self.recompute_num_layers):
            yield (
                "recompute_method and recompute_num_layers are for recompute_granularity full, which is "
                f"{self.recompute_granularity or 'null'}; set them to null"
            )
        if self.recompute_granularity == "selective" and not self.recompute_modules:
            yield (
                "recompute_modules is empty with recompute_granularity selective; name parts of a layer, such as "
                f"[{', '.join(DEFAULT_RECOMPUTE_MODULES)}]"
            )

    def resolve_data_parallel_size(self, world_size: int | None) -> int:
        """Return the number of replicas in a world of `world_size` ranks.

        `world_size` is None before this process launches the ranks: then replicas are as many as configured, or 1.

        Raises:
            InputError: the world size and the layout disagree.
        """
        if world_size is None:
            return self.data_parallel_size or 1
        if world_size % self.model_parallel_size:
            raise InputError(
                f"the world size is {world_size}, not a multiple of tensor x context x pipeline parallel size "
                f"{self.tensor_model_parallel_size} x {self.context_parallel_size} x "
                f"{self.pipeline_model_parallel_size} = {self.model_parallel_size}; start a multiple of "
                f"{self.model_parallel_size} ranks"
            )
        data_parallel_size = world_size // self.model_parallel_size
        if self.data_parallel_size not in (None, data_parallel_size):
            raise InputError(
                f"parallel.data_parallel_size is {self.data_parallel_size}, but {world_size} ranks hold "
                f"{data_parallel_size} replicas of {self.model_parallel_size} ranks; set it to null or start "
                f"{self.data_parallel_size * self.model_parallel_size} ranks"
            )
        return data_parallel_size


@functools.cache
def layout_chunks(text: str) -> tuple[str, ...]:
    """Return the chunks of a `pipeline_model_parallel_layout`, with repetitions written out, such as ("Ett", "ttL").

    A repetition that cannot be read, or gives too many layers, is left as text: `ParallelConfig.problems` refuses it.
    """
    whole = re.sub(r"[,\s]", "", text)
    # Groups first, as (tt|)*3, since a group may contain repeated symbols; then single symbols, as t*4.
    for repeated in (r"\(([^()]*)\)\*(\d{1,4})", r"([^()*])\*(\d{1,4})"):
        unrolled = re.sub(repeated, lambda match: match[1] * int(match[2]), whole)
        whole = unrolled if len(unrolled) <= 2 * MOST_LAYERS else whole
    return tuple(whole.split("|"))


def context_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of a context parallel rank's two chunks, of 2 * size equal chunks of a sequence.

    Megatron gives a rank one chunk from each end, so that all ranks have equal shares of the causal attention.
    """
    return rank, 2 * size - 1 - rank


# -- devices


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, threads and communication of the ranks."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: a GPU if torch can use one, else the CPU. `cpu` beside a usable GPU is refused: set
    `CUDA_VISIBLE_DEVICES` to nothing."""
    threads_per_rank: int | None = None
    """CPU threads per rank; null: `OMP_NUM_THREADS`, else the cores divided by the ranks of a machine."""
    cpu_kernels: Literal["auto", "compiled", "torch"] = "auto"
    """This project's CPU kernels, built by the machine's C++ compiler, or PyTorch's operations; `auto`: `compiled` if
    every rank finds a compiler."""
    deterministic_mode: bool = False
    """Bitwise the same numbers every time, more slowly on a GPU; a CPU run always has them
    (docs/gpu.md#the-same-numbers-every-time)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """null: NCCL on GPUs, gloo on CPUs. gloo also serves ranks that share a GPU, slowly, without pipeline stages or
    `cp_comm_type` p2p."""
    distributed_timeout_minutes: float | None = None
    """Time that a collective waits for a rank before the run ends; null: 10 minutes
    (docs/clusters.md#when-a-rank-fails)."""

    def backend(self, device: DeviceKind) -> str:
        """Return `distributed_backend` resolved for a device."""
        return self.distributed_backend or {"cuda": "nccl", "cpu": "gloo"}[device]

    @property
    def timeout(self) -> timedelta:
        """Return the timeout of every process group."""
        return timedelta(minutes=self.distributed_timeout_minutes or 10)

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        lines = []
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            lines.append(f"runtime.threads_per_rank is {self.threads_per_rank}; it must be at least 1, or null")
        if self.distributed_timeout_minutes is not None and self.distributed_timeout_minutes <= 0:
            lines.append(
                f"runtime.distributed_timeout_minutes is {self.distributed_timeout_minutes}; "
                "it must be above 0, or null"
            )
        return lines


DEFAULT_RUNTIME = RuntimeConfig()
