"""The section `kernels` of a run's configuration: the implementations of the layers.

None of it changes the result beyond the order of sums. Number formats are in the section `precision`.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_fanformer.errors import broken_fields

TransformerImpl = Literal["auto", "local", "transformer_engine"]

LOGITS_BYTES_ON_CPU, LOGITS_BYTES_ON_GPU = 200 * 2**20, 400 * 2**20
"""Logits that the loss head holds at a time. Every chunk reads and writes the weight's whole gradient, which must not
matter beside the matrix products: measured on a CPU in float32 (vocabulary 50304, width 512), chunks of 512 tokens cost
3% more than those of 1,024, and 64 tokens half as much again; in bf16 on AMX a step takes 2% longer with 1,024
than with 2,048; a Hopper GPU's products in bf16 are so fast that it needs some 4,000 tokens."""
ALIGNED_TOKENS = 64  # a chunk is a multiple of it: matrix units prefer whole tiles


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations that compute the layers."""

    transformer_impl: TransformerImpl = "auto"
    """Transformer Engine's layers, or megatron-core's and torch's; `auto`: the Engine on a GPU if it imports."""
    attention_backend: Literal["auto", "fused", "flash", "unfused"] = "auto"
    """Transformer Engine's attention: cuDNN's (`fused`), flash-attn's, or plain products; `auto`: the Engine's
    choice."""
    fused_single_qkv_rope: bool = False
    """Rotate queries and keys within the QKV tensor (Transformer Engine; docs/performance.md#gpu)."""
    chunked_loss_head: bool = True
    """Compute logits, loss and gradients a chunk of tokens at a time; false: Megatron's loss head, which keeps all
    logits."""
    loss_head_chunk_tokens: int | None = None
    """Tokens per chunk; null: 200 MiB of logits on a CPU, 400 MiB on a GPU."""
    cuda_graph_impl: Literal["none", "local"] = "none"
    """`local`: replay each layer as a CUDA graph (docs/gpu.md#cuda-graphs)."""
    gradient_accumulation_fusion: bool | None = None
    """Add weight gradients to their buffer inside the matrix product; null: in training, on a GPU only with
    Transformer Engine's layers or apex's `fused_weight_gradient_mlp_cuda`."""

    @property
    def fuses_gradient_accumulation(self) -> bool:
        """Return whether it was chosen or configured: a model that is not trained has no buffer to add to."""
        return bool(self.gradient_accumulation_fusion)

    def loss_chunk_tokens(self, logit_columns: int, element_bytes: int, *, on_cpu: bool) -> int:
        """`loss_head_chunk_tokens` resolved, for logits of that many bytes each.

        Args:
            logit_columns: token ids whose logits one rank has.
        """
        row_bytes = logit_columns * element_bytes
        tokens = (LOGITS_BYTES_ON_CPU if on_cpu else LOGITS_BYTES_ON_GPU) // row_bytes
        return self.loss_head_chunk_tokens or max(1, tokens // ALIGNED_TOKENS * ALIGNED_TOKENS or tokens)

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        demand = "be at least 1, or null"
        return broken_fields("kernels", self, demand, lambda value: value < 1, "loss_head_chunk_tokens")


DEFAULT_KERNELS = KernelsConfig()
