"""The layers of the local layer spec that are this project's own, in plain torch.

Shapes: s sequence, b micro batch, h hidden size, n heads of this rank, d head size, f inner size of the MLP, o rows of
a weight; T tensor parallel ranks, C context parallel ranks, t tokens (of all packed sequences, or of a micro batch).
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.ops.attention import attention
from megatron_fanformer.ops.element_wise import rms_norm, swiglu
from megatron_fanformer.ops.matrices import add_product
from megatron_fanformer.runtime.layout import context_chunks


class SwiGLU(MegatronModule):
    """The activation of megatron-core's MLP: silu(gate) * up, of [gate | up] in one tensor."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 f] to [..., f]."""
        return swiglu(gate_and_up)


class LocalBackend(LocalSpecProvider):
    """megatron-core's provider of local layers, with `SwiGLU` for its MLP."""

    def activation_func(self) -> type[torch.nn.Module]:
        """Return the activation that megatron-core's MLP takes if `use_te_activation_func` is set."""
        return SwiGLU


class ReplicatedLinear(MegatronModule):
    """A linear map that every tensor parallel rank holds whole and applies to its part of the sequence.

    A rank's gradients are of its part of the sequence; megatron-core sums them over the ranks at the end of a step, as
    it sums those of norms.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        tp_group: dist.ProcessGroup,
        **_ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group  # over which megatron-core's checkpoints count the weight as replicated
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # a mark: megatron-core then sums the gradients

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, None]:
        """Map [s / T, b, h] to [s / T, b, rows]; the None says that no bias is left to add, as in Megatron's layers."""
        return F.linear(x_sbh, self.weight, self.bias), None


class TorchCoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v by torch's scaled-dot-product attention, which stores no s x s matrix.

    Under context parallelism each rank gathers the keys and values of the whole sequence, for the queries of its two
    chunks of the sequence (`runtime.layout.context_chunks`).

    Packed sequences (documents) are computed one after another, neighbors of equal length together: the work grows with
    the sum of the squares of the documents' lengths.

    Takes the arguments of all of Megatron's core attentions. Raises ValueError for dropout, a bias, a mask that is not
    causal, and for packed sequences in another format than `thd` or under context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_ignored: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout is {config.attention_dropout}, but the local core attention has none; set it to 0"
            )
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_ignored: Any,
    ) -> Tensor:
        """Attend queries [s, b, n, d] to keys and values [s, b, n or fewer, d]; return [s, b, n * d].

        With `packed_seq_params`, the tokens t of all sequences take the place of s and b: [t, n, d] -> [t, n * d].
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask) or attention_bias is not None:
            raise ValueError(f"the local core attention has only causal masks and no bias; the mask is {mask_type}")
        is_causal = mask_type == AttnMaskType.causal
        is_context_parallel = self.cp_group is not None and self.cp_group.size() > 1
        if packed_seq_params is not None:
            if is_context_parallel or packed_seq_params.qkv_format != "thd":
                raise ValueError("the local core attention takes packed sequences as thd, without context parallelism")
            return self._attend_within(packed_seq_params.cu_seqlens_q, query, key, value, is_causal=is_causal)
        if is_context_parallel:
            return self._attend_to_whole_sequence(query, key, value)
        if not is_causal and len(query) > 1:
            # With a filled cache megatron-core sets no mask, which is right for one query. Several queries are the last
            # positions of the keys, and each query may see the keys up to its own position.
            may_see = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
            return self._attend(query, key, value, attn_mask=may_see.tril(diagonal=len(key) - len(query)))
        return self._attend(query, key, value, is_causal=is_causal)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **masking: Any) -> Tensor:  # -> [s, b, n * d]
        # Repeat keys and values that several queries share: with enable_gqa torch does not use its fused CPU kernel.
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context_bnsd = attention(query, key, value, scale=self.softmax_scale, **masking)
        return context_bnsd.permute(2, 0, 1, 3).flatten(2)

    def _attend_within(self, bounds: Tensor, *qkv: Tensor, is_causal: bool) -> Tensor:
        """Attend within each sequence between two of `bounds`; queries, keys and values [t, n, d] -> [t, n * d]."""
        # (length, count) of neighbors of equal length
        runs = [(length, len(list(run))) for length, run in itertools.groupby(bounds.diff().tolist())]
        # (query, key, value) of each run; split, not sliced: backward joins the parts once, and adds no whole tensors.
        parts = zip(*(x.split([length * count for length, count in runs]) for x in qkv), strict=True)
        contexts = []
        for (length, count), part in zip(runs, parts, strict=True):
            query, key, value = (x.unflatten(0, (count, length)).transpose(0, 1) for x in part)
            contexts.append(self._attend(query, key, value, is_causal=is_causal).transpose(0, 1).flatten(0, 1))
        return torch.cat(contexts)

    def _attend_to_whole_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention for this rank's two chunks of the sequence, [s / C, b, n, d] -> [s / C, b, n * d]."""
        assert self.cp_group is not None
        size = self.cp_group.size()
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
        chunks = gathered.chunk(2 * size)  # the two of rank 0, then the two of rank 1, ...
        chunk_numbers = [number for rank in range(size) for number in context_chunks(rank, size)]
        in_order = torch.cat([chunks[chunk_numbers.index(number)] for number in range(2 * size)])
        key, value = in_order.chunk(2, dim=-1)
        length = query.shape[0] // 2  # of a chunk
        outputs = []
        for number, query_chunk in zip(context_chunks(self.cp_group.rank(), size), query.chunk(2), strict=True):
            end = (number + 1) * length
            mask = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(diagonal=number * length)
            outputs.append(self._attend(query_chunk, key[:end], value[:end], attn_mask=mask))
        return torch.cat(outputs)


class RMSNorm(torch.nn.Module):
    """RMSNorm that also runs under sequence parallelism, where megatron-core's wrapper of torch's norm refuses to."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # The mark by which megatron-core sums the gradient over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis; the mean square is computed in float32."""
        return rms_norm(x, self.weight, self.eps)


def weight_gradient(weight_oh: Any, grad_to: Tensor, x_th: Tensor, *, fuses_accumulation: bool) -> Tensor | None:
    """Return the gradient of a weight; if accumulation is fused, add it to `main_grad`, and return its `stand_in`."""
    if fuses_accumulation and hasattr(weight_oh, "main_grad"):
        add_product(weight_oh.main_grad, grad_to, x_th)
        return stand_in(weight_oh)
    return grad_to.t().matmul(x_th)


def stand_in(weight_oh: Any) -> Tensor | None:
    """Return the value that backward must return for a weight whose gradient is in `main_grad` already.

    Megatron marks the weight as ready for reduction if backward returns any tensor, and does not read that tensor if
    the weight has the flag `grad_added_to_main_grad`. A weight that is also this stage's embedding (it has
    `zero_out_wgrad`) gets a gradient from the embedding, which must be read: the result is then None.
    """
    if getattr(weight_oh, "zero_out_wgrad", False):
        return None
    weight_oh.grad_added_to_main_grad = True
    return torch.empty_like(weight_oh)
