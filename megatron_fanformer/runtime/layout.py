"""A layout: the parallel degrees and what goes with them, by Megatron's names, and the rules between them.

Rules that need the model's shape stand in `training/layout_rules.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import device as devices

FANForm = Literal["column", "sequence"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp"]
DEFAULT_RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = ("core_attn",)

COUNTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "data_parallel_size",
    "ddp_bucket_size",
    "recompute_num_layers",
    "cross_entropy_chunk_tokens",
    "threads_per_rank",
)

LOGITS_BYTES: dict[devices.DeviceKind, int] = {"cpu": 100 * 2**20, "cuda": 400 * 2**20}
"""Logits that the loss head has at a time. Every chunk reads and writes the weight's whole gradient, which must not
count beside the matrix products: measured on a CPU in float32 (vocabulary 50304, width 512), chunks of 512 tokens cost
3% above those of 1,024, and 64 tokens half as much again; a Hopper GPU's products in bf16 are so fast that it wants
some 4,000 tokens."""
ALIGNED_TOKENS = 64  # a chunk is a multiple of it: matrix units like whole tiles


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the data are spread over ranks, and what the ranks run on."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks of layers a stage holds, taken in turns (the interleaved schedule); null: one, by 1F1B."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage, where the stages are not to be equal; null: as many as the middle ones."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage, likewise."""
    context_parallel_size: int = 1
    """Ranks that share each sample's sequence, in attention too."""
    data_parallel_size: int | None = None
    """Replicas of the model. null: what the world size leaves under torchrun or Slurm, else 1."""
    sequence_parallel: bool = False
    """Shard norms and residuals along the sequence over the tensor parallel ranks."""
    fan_form: FANForm = "column"
    """The FAN map over tensor parallel ranks: `column` shards it and gathers its pre-activation; `sequence`, with
    sequence parallelism, replicates it and runs it on each rank's part of the sequence."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over the data parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over the replicas while backward is still running; null: on GPUs, where there are replicas."""
    overlap_param_gather: bool | None = None
    """Gather updated weights while the next forward is running (the distributed optimizer's); null: likewise."""
    ddp_bucket_size: int | None = None
    """Parameters a bucket of overlapped communication; null: Megatron's own choice."""
    gradient_accumulation_fusion: bool | None = None
    """Add weight gradients into the float32 buffer inside the matrix product; null: in training on a GPU
    with Transformer Engine's layers, or with apex's kernel."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: whole layers, or `recompute_modules` alone; null: keep them."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: `uniform` keeps the input of every `recompute_num_layers` layers, `block` recomputes each of the
    first `recompute_num_layers` of a stage."""
    recompute_num_layers: int | None = None
    """With `full`: see recompute_method."""
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: [*DEFAULT_RECOMPUTE_MODULES])
    """With `selective`: the parts of a layer that are recomputed."""
    cross_entropy_loss_fusion: bool = True
    """Take a chunk of tokens through logits, loss and their gradients at a time, in forward; false: Megatron's own loss
    head, which keeps the logits of a whole micro batch."""
    cross_entropy_chunk_tokens: int | None = None
    """Tokens a chunk of the fused loss head; null: as many as have 100 MiB of logits on a CPU, 400 MiB on a GPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes a usable GPU, else the CPU; a broken GPU installation is refused."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers from Transformer Engine, or megatron-core's and torch's own; `auto` takes the Engine where it imports."""
    attention_backend: Literal["auto", "fused", "flash", "unfused"] = "auto"
    """Of Transformer Engine's core attention: cuDNN's (`fused`), flash-attn's, or plain products; `auto` leaves the
    choice to the Engine."""
    cuda_graph_impl: Literal["none", "local"] = "none"
    """`local`: replay each layer as a CUDA graph, megatron-core's own, which spares the host its launches. It has not
    been measured yet."""
    deterministic_mode: bool = False
    """Give the same numbers bit by bit every time, on a GPU at the cost of speed (a CPU run does so anyway)."""
    threads_per_rank: int | None = None
    """CPU threads a rank; null: the machine's cores, shared evenly by its ranks."""
    distributed_timeout_minutes: float = 10.0
    """How long a rank waits for the others before it gives up."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers a stage, `virtual_pipeline_model_parallel_size` resolved."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def fuses_gradient_accumulation(self) -> bool:
        """Whether it was chosen or asked for: a model that is not trained has no buffer to add to."""
        return bool(self.gradient_accumulation_fusion)

    @property
    def fuses_all_gradient_accumulation(self) -> bool:
        """Whether the layers that are not Transformer Engine's can, too: by apex's kernel."""
        return self.fuses_gradient_accumulation and devices.has_fused_gradient_kernel()

    def has_fused_gradients(self) -> bool:
        """Whether this machine's layers can add weight gradients inside the product."""
        has_engine = self.transformer_impl != "local" and devices.has_transformer_engine()
        return has_engine or devices.has_fused_gradient_kernel()

    def loss_chunk_tokens(self, padded_vocab_size: int, element_bytes: int, device: devices.DeviceKind) -> int:
        """`cross_entropy_chunk_tokens` resolved, for logits of that many bytes each."""
        row_bytes = padded_vocab_size // self.tensor_model_parallel_size * element_bytes
        tokens = LOGITS_BYTES[device] // row_bytes
        return self.cross_entropy_chunk_tokens or max(1, tokens // ALIGNED_TOKENS * ALIGNED_TOKENS or tokens)

    def layers_per_stage(self, num_layers: int) -> list[int] | None:
        """Layers of each pipeline stage, its chunks together; None where they do not divide."""
        stages = self.pipeline_model_parallel_size
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        others = stages - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        if left < 0 or (left % others if others else left):
            return None
        middle = left // others if others else 0
        layers = [middle] * stages
        layers[0] = middle if first is None else first
        layers[-1] = (middle if last is None else last) if stages > 1 else layers[0]
        return layers

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each; if none, rules between its fields."""
        found = [
            f"parallel.{name} is {value}; it must be at least 1"
            for name in COUNTS
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.distributed_timeout_minutes <= 0:
            found.append(
                f"parallel.distributed_timeout_minutes is {self.distributed_timeout_minutes}; it must be above 0"
            )
        return found or [
            f"parallel.{problem}" for problem in (*self._model_parallel_problems(), *self._other_problems())
        ]

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
        pipeline = self.pipeline_model_parallel_size
        if self.virtual_stages > 1 and pipeline == 1:
            yield (
                f"virtual_pipeline_model_parallel_size is {self.virtual_stages} at pipeline_model_parallel_size 1, "
                "where no schedule is to be interleaved; set it to null, or raise the pipeline parallel size"
            )
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(self, name) is not None and pipeline == 1:
                yield f"{name} is {getattr(self, name)} at pipeline_model_parallel_size 1; set it to null"

    def _other_problems(self) -> Iterator[str]:
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            yield (
                "overlap_param_gather is true without use_distributed_optimizer, which alone gathers weights; set "
                "that to true, or this to false"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield "overlap_param_gather is true without overlap_grad_reduce, which it needs; set that to true too"
        if self.gradient_accumulation_fusion and not self.has_fused_gradients():
            yield (
                "gradient_accumulation_fusion is true, but there is no GPU with Transformer Engine's layers, and "
                "apex's fused_weight_gradient_mlp_cuda does not import; set it to null"
            )
        if self.cuda_graph_impl == "local" and not devices.has_gpu():
            yield "cuda_graph_impl is local, but there is no GPU; set it to none"
        if self.cuda_graph_impl == "local" and self.recompute_granularity == "full":
            yield (
                "cuda_graph_impl is local with recompute_granularity full, but a layer's graph cannot be recomputed as "
                "a whole; set one of them to none, or the latter to selective"
            )
        yield from self._recompute_problems()

    def _recompute_problems(self) -> Iterator[str]:
        is_full = self.recompute_granularity == "full"
        if is_full and (self.recompute_method is None or self.recompute_num_layers is None):
            yield (
                "recompute_granularity is full, which needs recompute_method (uniform or block) and "
                "recompute_num_layers; for every layer alone set them to uniform and 1"
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
        """Replicas in a world of `world_size` ranks; None where the ranks are still to be launched here.

        Raises:
            InputError: the world size and the layout disagree.
        """
        if world_size is None:
            return self.data_parallel_size or 1
        if world_size % self.model_parallel_size:
            raise InputError(
                f"the world size is {world_size}, no multiple of tensor x context x pipeline parallel size "
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
