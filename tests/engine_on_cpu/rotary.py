"""Rotary embedding of the stand-in: angles and products in float32, the output rounded once.

Shapes: s sequence, b batch, h heads, d head size, r rotated part of it, S longest sequence, n tokens of all packed
sequences.
"""

from typing import Any

import torch
from torch import Tensor


def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """[s, b, h, d] (or [b, s, h, d], or [n, h, d]) rotated by the angles [S, 1, 1, r] of its positions."""
    _refuse(start_positions, qkv_format, interleaved, cu_seqlens, cp_size)
    return _rotated(t, _own_angles(t, freqs, qkv_format, cp_size, cp_rank, cu_seqlens), 1.0)


def fused_rope_backward(
    grad: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The same, rotated back."""
    _refuse(start_positions, qkv_format, interleaved, cu_seqlens, cp_size)
    return _rotated(grad, _own_angles(grad, freqs, qkv_format, cp_size, cp_rank, cu_seqlens), -1.0)


def fused_qkv_rope_forward(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    widths: list[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, b, h n, d], keys and values [s, b, h, d] of [s, b, h, (n + 2) d], the first two rotated."""
    _refuse(start_positions, qkv_format, interleaved, None)
    size = widths[1]
    query, key, value = qkv.split(widths, dim=-1)
    query = query.reshape(*query.shape[:2], -1, size)
    return (
        _rotated(query, _own_angles(query, q_freqs, qkv_format, cp_size, cp_rank), 1.0),
        _rotated(key, _own_angles(key, k_freqs, qkv_format, cp_size, cp_rank), 1.0),
        value.contiguous(),
    )


def fused_qkv_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    widths: list[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The gradient of queries, keys and values in one tensor."""
    _refuse(None, qkv_format, interleaved, None)
    query = _rotated(grad_q, _own_angles(grad_q, q_freqs, qkv_format, cp_size, cp_rank), -1.0)
    key = _rotated(grad_k, _own_angles(grad_k, k_freqs, qkv_format, cp_size, cp_rank), -1.0)
    query = query.reshape(*key.shape[:-1], widths[0])
    return torch.cat([query, key, grad_v], dim=-1)


def _refuse(start_positions: Any, qkv_format: Any, interleaved: bool, cu_seqlens: Any, cp_size: int = 1) -> None:
    is_packed = qkv_format.name == "NVTE_THD" and cu_seqlens is not None and cp_size == 1
    is_known = is_packed or (qkv_format.name in ("NVTE_SBHD", "NVTE_BSHD") and cu_seqlens is None)
    if start_positions is not None or interleaved or not is_known:
        raise NotImplementedError("rotary embedding of interleaved or spread packed tensors is not in the stand-in")


def _own_angles(
    t: Tensor, freqs: Tensor, qkv_format: Any, cp_size: int, cp_rank: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The angles of this rank's two chunks of the sequence, or of each packed sequence, broadcast over t's axes."""
    if cu_seqlens is not None:
        return torch.cat([freqs[:length] for length in cu_seqlens.diff().tolist()]).squeeze(1).float()
    is_sbhd = qkv_format.name == "NVTE_SBHD"
    length = t.shape[0 if is_sbhd else 1]
    if cp_size > 1:
        half, whole = length // 2, cp_size * length
        first, last = cp_rank * half, whole - (cp_rank + 1) * half
        freqs = torch.cat([freqs[first : first + half], freqs[last : last + half]])
    angles = freqs[:length].float()
    return angles if is_sbhd else angles.transpose(0, 1)


def _rotated(t: Tensor, angles: Tensor, direction: float) -> Tensor:
    rotated, rest = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    one, other = rotated.chunk(2, dim=-1)
    turned = rotated * angles.cos() + direction * torch.cat([-other, one], dim=-1) * angles.sin()
    return torch.cat([turned.to(t.dtype), rest], dim=-1)
