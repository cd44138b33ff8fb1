"""What the communication of a training step depends on, and the terms that it is made of.

Shapes, here and in `layer_traffic`: s tokens per sample, b samples per micro batch, T, C and P tensor, context and
pipeline parallel ranks, D replicas, h hidden size, k rows of the FAN map ((1 - p_ratio) h), v width of all values;
c = s / C tokens of a sample on one context parallel rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.kernels import DEFAULT_KERNELS, KernelsConfig
from megatron_fanformer.runtime.layout import ParallelConfig


class Term(NamedTuple):
    """Collectives of one purpose."""

    group: str
    kind: str
    purpose: str
    message_bytes: int
    """Of all calls."""
    calls: int = 1

    def times(self, number: int) -> "Term":
        """The same, that many times over."""
        return self._replace(message_bytes=self.message_bytes * number, calls=self.calls * number)

    def again(self) -> "Term":
        """The same, because backward runs a part of forward again."""
        return self._replace(purpose=f"{self.purpose}, recomputed")


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """One training step, as a rank of one pipeline stage sees it."""

    model: FANformerConfig
    parallel: ParallelConfig
    data_parallel_size: int
    micro_batch_size: int
    """Samples per micro batch."""
    num_micro_batches: int
    """Of one replica, per step."""
    element_bytes: int
    """Of activations and weights: 4 in fp32, 2 in bf16."""
    stage: int = 0
    """Pipeline stage of the rank; all ranks of a stage communicate alike."""
    kernels: KernelsConfig = DEFAULT_KERNELS
    on_cpu: bool = False
    """Whether the rank runs on a CPU, where the loss head has other chunks."""

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
        """Return the bytes that a stage sends to the next: [c, b, h], or with sequence parallelism this rank's part."""
        return self.hidden_bytes // (self.tensor_ranks if self.parallel.sequence_parallel else 1)

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on one context parallel rank, c b."""
        return self.micro_batch_size * self.model.seq_length // self.parallel.context_parallel_size

    @property
    def loss_chunks(self) -> int:
        """Chunks that the chunked loss head cuts a micro batch's tokens into."""
        columns = self.model.padded_vocab_size // self.tensor_ranks
        return -(-self.tokens // self.kernels.loss_chunk_tokens(columns, self.element_bytes, on_cpu=self.on_cpu))

    @property
    def tensor_ranks(self) -> int:
        """T."""
        return self.parallel.tensor_model_parallel_size

    @property
    def stages(self) -> int:
        """P."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Return whether the rank has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether the rank has the head."""
        return self.stage == self.stages - 1

    @property
    def has_column_fan(self) -> bool:
        """Return whether there is a FAN map, and its rows are sharded over the tensor parallel ranks."""
        return self.model.has_fan and self.parallel.fan_form == "column"

    def group_sizes(self) -> dict[str, int]:
        """Ranks of each group that this rank is in."""
        world = self.parallel.model_parallel_size * self.data_parallel_size
        return {
            "tp": self.tensor_ranks,
            "cp": self.parallel.context_parallel_size,
            "pp": self.stages,
            "dp_cp": self.data_parallel_size * self.parallel.context_parallel_size,
            "mp": self.tensor_ranks * self.stages,
            "embd": min(self.stages, 2) if self.is_first_stage or self.is_last_stage else 1,
            "intra_dist_opt": world,
            "world": world,
        }
