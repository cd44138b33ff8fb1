"""The Engine's attention kernels in the stand-in: cuDNN's fused one, and the masked softmaxes of the unfused one.

The numerics are those of a flash attention: scores and sums in float32, probabilities and their gradients rounded to
the inputs' type before they are multiplied; what is kept for backward is one float32 number a row.

Packed sequences are attended to one after the other.

Shapes: b batch, h heads, s queries, t keys, d head size; n tokens of all packed sequences.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SBHD, BSHD, THD = "NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD", "NVTE_THD_THD_THD"
TO_BHSD = {SBHD: (1, 2, 0, 3), BSHD: (0, 2, 1, 3)}
FROM_BHSD = {SBHD: (2, 0, 1, 3), BSHD: (0, 2, 1, 3)}
# By the layout of queries, keys and values: that of the output.
FORMATS = {"NVTE_SBHD": SBHD, "NVTE_BSHD": BSHD, "NVTE_THD": THD}
# By the mask: whether the last query sees all keys. A packed sequence, taken by itself, has no padding.
CAUSAL = {"NVTE_CAUSAL_MASK": False, "NVTE_CAUSAL_BOTTOM_RIGHT_MASK": True, "NVTE_PADDING_CAUSAL_MASK": False}
MASKED_OUT = -10000.0  # what the softmax kernels put in place of a masked score


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    """cuDNN's kernel for 16-bit inputs, where the functions below can compute it."""
    import transformer_engine_torch as extension

    backends, given = extension.NVTE_Fused_Attn_Backend, fused_attn_params
    reasons = [
        reason
        for reason, holds in {
            "it has 16-bit inputs alone": given.qkv_dtype.name in ("kFloat16", "kBFloat16"),
            "the stand-in has no dropout": given.dropout == 0.0,
            "the stand-in has no bias": given.bias_type == extension.NVTE_Bias_Type.NVTE_NO_BIAS,
            "the stand-in has one softmax": given.softmax_type == extension.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
            "the stand-in has three layouts": given.qkv_layout.name in (*TO_BHSD, THD),
            "the stand-in has padding between packed sequences alone": (
                "PADDING" not in given.attn_mask_type.name or given.qkv_layout.name == THD
            ),
            "the stand-in has no windows": given.window_size_left == -1 and given.window_size_right in (-1, 0),
        }.items()
        if not holds
    ]
    if reasons:
        return backends.NVTE_No_Backend, "; ".join(reasons)
    return backends.NVTE_F16_arbitrary_seqlen, ""


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """softmax(Q Kᵀ scale) V, the logarithm of each row's sum of exponentials [b, h, s, 1] (packed: [n, h, 1]), and a
    random state.

    All three in training and evaluation alike: the Engine's Python takes them apart in both.
    """
    _refuse(p_dropout, s_quantizer, o_quantizer, Bias, SoftmaxOffset, page_table_k, return_max_logit)
    layout = qkv_layout.name
    parts = zip(
        _parts(Q, layout, cu_seqlens_q),
        _parts(K, layout, cu_seqlens_kv),
        _parts(V, layout, cu_seqlens_kv),
        strict=True,
    )
    outputs, statistics = zip(*(_attended(*part, attn_scale, attn_mask_type) for part in parts), strict=True)
    output = _whole(outputs, FORMATS[o_format.name]).to(Q.dtype).contiguous()
    rows = _whole(statistics, THD) if layout == THD else statistics[0]
    return [output, rows, torch.zeros(2, dtype=torch.int64)]


def _attended(query: Tensor, key: Tensor, value: Tensor, scale: float, mask_type: Any) -> tuple[Tensor, Tensor]:
    """Output [b, h, s, d] and statistics [b, h, s, 1] in float32, of [b, h, s or t, d]."""
    scores = _scores(query, _repeated(key, query), scale, mask_type)
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    sums = weights.sum(-1, keepdim=True)
    return weights.to(query.dtype).float() @ _repeated(value, query).float() / sums, highest + sums.log()


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """Gradients of Q, K and V; no bias, no softmax offset."""
    _refuse(p_dropout, s_quantizer, dp_quantizer, dqkv_quantizer)
    layout, rows = qkv_layout.name, Aux_CTX_Tensors[0]
    parts = zip(
        _parts(Q, layout, cu_seqlens_q),
        _parts(K, layout, cu_seqlens_kv),
        _parts(V, layout, cu_seqlens_kv),
        _parts(O, FORMATS[o_format.name], cu_seqlens_q),
        _parts(dO, FORMATS[do_format.name], cu_seqlens_q),
        _parts(rows, THD, cu_seqlens_q) if layout == THD else [rows],
        strict=True,
    )
    grads = zip(*(_attended_back(*part, attn_scale, attn_mask_type) for part in parts), strict=True)
    return [*(_whole(parts, dqkv_layout.name).to(Q.dtype).contiguous() for parts in grads), None, None]


def _attended_back(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, rows: Tensor, scale: float, mask_type: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values in float32, [b, h, s or t, d] as they are; `rows` are the statistics."""
    repeated_key, repeated_value = _repeated(key, query).float(), _repeated(value, query).float()
    grad_f = grad.float()
    weights = (_scores(query, repeated_key, scale, mask_type) - rows).exp()
    along = (grad_f * output.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_f @ repeated_value.transpose(-2, -1) - along)
    weights, grad_scores = weights.to(query.dtype).float(), grad_scores.to(query.dtype).float()
    grad_query = scale * (grad_scores @ repeated_key)
    grad_key = scale * (grad_scores.transpose(-2, -1) @ query.float())
    grad_value = weights.transpose(-2, -1) @ grad_f
    return grad_query, _summed(grad_key, key), _summed(grad_value, value)


def _parts(tensor: Tensor, layout: str, bounds: Tensor) -> list[Tensor]:
    """A tensor as [b, h, s, d]; of packed sequences, each as [1, h, s, d]."""
    if layout != THD:
        return [tensor.permute(TO_BHSD[layout])]
    return [sequence.transpose(0, 1).unsqueeze(0) for sequence in tensor.split(bounds.diff().tolist())]


def _whole(parts: Sequence[Tensor], layout: str) -> Tensor:
    """What `_parts` makes of a tensor."""
    if layout != THD:
        return parts[0].permute(FROM_BHSD[layout])
    return torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])


# -- for the unfused attention, which takes packed sequences as padded ones


def convert_thd_to_bshd(packed: Tensor, bounds: Tensor, batch_size: int, longest: int) -> Tensor:
    """[n, h, d] -> [b, longest, h, d], zeros after the end of each sequence."""
    padded = packed.new_zeros(batch_size, longest, *packed.shape[1:])
    for sequence, row in zip(packed.split(bounds.diff().tolist()), padded, strict=True):
        row[: len(sequence)] = sequence
    return padded


def convert_bshd_to_thd(padded: Tensor, bounds: Tensor, tokens: int) -> Tensor:
    """[b, longest, h, d] -> [n, h, d], without what is after the end of each sequence."""
    packed = torch.cat([row[:length] for row, length in zip(padded, bounds.diff().tolist(), strict=True)])
    assert len(packed) == tokens
    return packed


def _refuse(p_dropout: float, *absent: Any) -> None:
    if p_dropout or any(absent):
        raise NotImplementedError("attention in FP8, with dropout, bias, offsets or pages is not in the stand-in")


def _scores(query: Tensor, key: Tensor, scale: float, mask_type: Any) -> Tensor:
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    if mask_type.name == "NVTE_NO_MASK":
        return scores
    if mask_type.name not in CAUSAL:
        raise NotImplementedError(f"attention under {mask_type.name} is not in the stand-in")
    queries, keys = scores.shape[-2:]
    diagonal = 1 + (keys - queries if CAUSAL[mask_type.name] else 0)
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(hidden, -math.inf)


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    """Heads that several queries share, once for each."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _summed(grad: Tensor, key: Tensor) -> Tensor:
    """What `_repeated` makes of a gradient."""
    return grad.unflatten(1, (key.shape[1], -1)).sum(2)


# -- softmaxes: input [..., s, t], computed in float32


def scaled_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Without a mask."""
    return (input.float() * scale).softmax(-1).to(input.dtype)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scores are masked out where the mask is set."""
    return (input.float() * scale).masked_fill(mask.bool(), MASKED_OUT).softmax(-1).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Causal, as many keys as queries."""
    return scaled_aligned_causal_masked_softmax_forward(input, scale)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Causal, the last query sees all keys."""
    queries, keys = input.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return (input.float() * scale).masked_fill(hidden, -math.inf).softmax(-1).to(input.dtype)


def scaled_softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """The gradient of the scores; that of masked ones is zero, as their probability is."""
    grad, made = output_grad.float(), softmax_results.float()
    return (scale_factor * made * (grad - (grad * made).sum(-1, keepdim=True))).to(output_grad.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
