"""The job whose memory, time and communication this package predicts: a model in one layout; and the model's FLOPs.

Shapes, here and in `communication`: s tokens per sample, b samples per micro batch, T tensor and C context parallel
ranks, c = s / C tokens of a sample on one context parallel rank; h hidden size, v width of all values, d of one head.
The FAN map gives p | g, of k = (1 - p_ratio) h numbers a token; X_F = [cos p, sin p, g], of h numbers, enters QKV.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_fanformer.model.config import FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.gradient_buffers import OptimizerStates
from megatron_fanformer.runtime.layout import ParallelConfig

Layers = Literal["local", "transformer_engine"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
BACKWARD_AND_FORWARD = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model in one layout, every open field resolved."""

    model: FANformerConfig
    parallel: ParallelConfig
    kernels: KernelsConfig
    precision: PrecisionConfig  # `dtype` is fp32 or bf16, not auto
    optimizer: OptimizerStates
    data_parallel_size: int  # replicas; context parallelism may spread the samples of each over further ranks
    micro_batch_size: int  # samples per micro batch
    num_micro_batches: int  # of one replica per step
    layers: Layers  # the layers' implementation: Transformer Engine's, or the local one, Megatron's and ours
    has_document_ids: bool = False  # whether every stage reads the samples' document ids: `data.reset_attention_mask`
    on_cpu: bool = False

    @property
    def tensor_ranks(self) -> int:
        """Return T, the number of tensor parallel ranks."""
        return self.parallel.tensor_model_parallel_size

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return self.parallel.model_parallel_size * self.data_parallel_size

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro batch on one context parallel rank, c b."""
        return self.micro_batch_size * self.model.seq_length // self.parallel.context_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a training step, over all replicas."""
        return self.model.seq_length * self.micro_batch_size * self.num_micro_batches * self.data_parallel_size

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one number of a weight or an activation."""
        return ELEMENT_BYTES[self.precision.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of one number of a gradient, in the format in which gradients are added up and reduced."""
        return ELEMENT_BYTES["fp32"] if self.precision.grad_reduce_in_fp32 else self.element_bytes

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of [c, b, 1]: one number per token of a micro batch on one context parallel rank."""
        return self.tokens * self.element_bytes

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of [c, b, h]."""
        return self.activation_bytes * self.model.hidden_size

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes that a stage sends to the next: [c, b, h], or this rank's part of the sequence."""
        return self.hidden_bytes // (self.tensor_ranks if self.parallel.sequence_parallel else 1)

    @property
    def has_column_fan(self) -> bool:
        """Return whether there is a FAN map whose rows are sharded over the tensor parallel ranks."""
        return self.model.has_fan and self.parallel.fan_form == "column"

    @property
    def fuses_input_norm(self) -> bool:
        """Return whether the linear map after the input norm also computes that norm, and again in backward.

        The Engine fuses every norm so, except the input norm before a FAN map of the `sequence` form.
        """
        return self.layers == "transformer_engine" and not (self.model.has_fan and self.parallel.fan_form == "sequence")

    @property
    def has_ring(self) -> bool:
        """Return whether context parallel ranks send keys and values in a ring, as the Engine does by default."""
        is_chosen = self.parallel.cp_comm_type in (None, "p2p") and self.layers == "transformer_engine"
        return is_chosen and self.parallel.context_parallel_size > 1

    @property
    def gathers_twice(self) -> bool:
        """Return whether context parallel ranks gather keys and values again in backward.

        The Engine does so if it is configured to gather; the local layers keep the gathered keys and values.
        """
        is_chosen = self.parallel.cp_comm_type == "all_gather" and self.layers == "transformer_engine"
        return is_chosen and self.parallel.context_parallel_size > 1

    @property
    def keeps_scores(self) -> bool:
        """Return whether attention is plain matrix products, which keep every score for backward.

        The Engine's attention is plain if `attention_backend` says so, and always in float32; the local layers' never.
        """
        is_plain = self.kernels.attention_backend == "unfused" or self.precision.dtype == "fp32"
        return self.layers == "transformer_engine" and is_plain

    @property
    def state_ranks(self) -> int:
        """Return the number of ranks that share the optimizer's state."""
        return self.parallel.state_ranks(self.data_parallel_size)

    @property
    def state_group(self) -> str:
        """Return the name of the process group of the ranks that share the optimizer's state."""
        return "dp_cp" if self.parallel.num_distributed_optimizer_instances == 1 else "intra_dp_cp"

    def group_sizes(self, stage: int) -> dict[str, int]:
        """Return the size of a stage's process groups; only the end stages share tied embeddings (`embd`)."""
        context, instances = self.parallel.context_parallel_size, self.parallel.num_distributed_optimizer_instances
        return {
            "tp": self.tensor_ranks,
            "cp": context,
            "tp_cp": self.tensor_ranks * context,
            "pp": self.stages,
            "dp_cp": self.data_parallel_size * context,
            "tp_dp_cp": self.tensor_ranks * self.data_parallel_size * context,
            "mp": self.tensor_ranks * self.stages,
            "embd": min(self.stages, 2) if stage in (0, self.stages - 1) else 1,
            "intra_dp_cp": self.state_ranks,
            "inter_dist_opt": instances,
            "intra_dist_opt": self.world_size // instances,
            "world": self.world_size,
        }


# -- model FLOPs: the multiplications and additions (2 per weight) of every matrix product, and the half of causal
# attention that is not masked; backward costs twice the forward. Element-wise work is not counted.


def forward_flops_per_token(config: FANformerConfig, seq_length: int | None = None) -> int:
    """Return the FLOPs of one token's forward pass: the mean of a sample of `seq_length` (None: the model's) tokens."""
    h, heads_width = config.hidden_size, config.num_attention_heads * config.kv_channels
    mlp = sum(rows * columns for rows, columns in config.ffn_maps)
    scores_and_context = 2 * heads_width * (seq_length or config.seq_length) // 2  # two products, half masked
    layer = h * (config.fan_rows + config.qkv_rows + heads_width) + mlp + scores_and_context
    return 2 * (config.num_layers * layer + h * config.padded_vocab_size)


def training_flops_per_token(config: FANformerConfig, seq_length: int | None = None) -> int:
    """Return the FLOPs of one token's forward and backward pass."""
    return BACKWARD_AND_FORWARD * forward_flops_per_token(config, seq_length)
