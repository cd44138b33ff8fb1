"""A training step of a whole layout: what memory, time and communication by formula are asked about."""

from dataclasses import dataclass
from typing import Literal

from megatron_fanformer.model.config import FANformerConfig, PrecisionConfig
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.planning.gradient_buffers import OptimizerStates
from megatron_fanformer.planning.step_traffic import StepTraffic
from megatron_fanformer.runtime.layout import ParallelConfig

Layers = Literal["local", "transformer_engine"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model in one layout, every open field resolved."""

    model: FANformerConfig
    parallel: ParallelConfig
    kernels: KernelsConfig
    precision: PrecisionConfig
    """Its `dtype` is fp32 or bf16, not auto."""
    optimizer: OptimizerStates
    """For what it keeps of each weight."""
    data_parallel_size: int
    """Replicas, each of which context parallelism may spread further."""
    micro_batch_size: int
    """Samples per micro batch."""
    num_micro_batches: int
    """Of one replica, per step."""
    layers: Layers
    """Whose layers: Transformer Engine's, or Megatron's and ours."""
    on_cpu: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.parallel.model_parallel_size * self.data_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a training step, over all replicas."""
        return self.model.seq_length * self.micro_batch_size * self.num_micro_batches * self.data_parallel_size

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of a weight, and of an activation."""
        return ELEMENT_BYTES[self.precision.dtype]

    @property
    def fuses_input_norm(self) -> bool:
        """Return whether the input norm is inside the map that reads it, which recomputes it anyway.

        The Engine fuses it there, and the norm before the MLP always; not a norm in front of the `sequence` form's map.
        """
        is_column = self.parallel.fan_form == "column" or not self.model.has_fan
        return self.layers == "transformer_engine" and is_column

    @property
    def has_ring(self) -> bool:
        """Return whether context parallel ranks send keys and values in a ring, as the Engine does by default."""
        is_sent = self.layers == "transformer_engine" and self.parallel.cp_comm_type in (None, "p2p")
        return is_sent and self.parallel.context_parallel_size > 1

    def traffic(self, stage: int) -> StepTraffic:
        """The step as a rank of one pipeline stage sees it."""
        return StepTraffic(
            model=self.model,
            parallel=self.parallel,
            data_parallel_size=self.data_parallel_size,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            element_bytes=self.element_bytes,
            stage=stage,
            kernels=self.kernels,
            on_cpu=self.on_cpu,
        )
