"""The FAN activation as one Triton kernel forward and one backward: each reads every element once, and writes it once.

A program handles a tile, tokens by columns, of the periodic or of the linear rows of one tensor parallel rank. The
kernels are limited by memory: a tile keeps four 16-byte loads in flight per thread, and consecutive programs take
consecutive columns, so that programs which run together touch whole rows. cos and sin share one reduction of the phase,
in float32 whatever the tensors' type.

Shapes: t tensor parallel ranks, n tokens, r = P + G rows of one output's map on one rank, w = t (2P + G) the output's
width, v = t G.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (Triton takes the annotations of its functions for Triton types.)

import triton
import triton.language as tl
from torch import Tensor

TILE_COLUMNS = 128
"""Most columns of a tile: the paper's sizes have P and G in multiples of 128, and rows of whole cache lines."""
TILE_BYTES = 8192
"""Bytes of a tile: four 16-byte loads per thread."""
WARPS = 4
LARGEST_ROW_STRIDE = 2**20
"""Largest row stride, in elements: offsets within a tile are 32-bit numbers, and a tile has at most 2^11 rows."""

# cos and sin, within 3 units in the last place of float32: the largest error over 8 million phases was 2.5.
LARGEST_REDUCED = tl.constexpr(12_000.0)
"""Smaller phases have fewer than 2^13 quarter turns, whose products with 11-bit numbers are exact in float32."""
QUARTERS = tl.constexpr(0.6366197723675814)  # quarter turns per radian: 2/π
ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds a float32 to an integer
# π/2 in pieces of 11, 11, 11 and 24 bits, highest first: products are exact with fused multiply-adds and without them.
QUARTER_A, QUARTER_B = tl.constexpr(1.5703125), tl.constexpr(0.0004837512969970703)
QUARTER_C, QUARTER_D = tl.constexpr(7.549533620476723e-08), tl.constexpr(2.5633440682570896e-12)
# (sin r - r) / r^3 and (cos r - 1 + r^2/2) / r^4 in powers of r^2, minimax on [-0.7875, 0.7875], which is π/4 and the
# rounding of the quarter turns. Fitted by iteratively reweighted least squares to relative errors of 2^-27.9 and 2^-33.
SIN_3, SIN_5, SIN_7 = (tl.constexpr(c) for c in (-0.16666653752326965, 0.00833214819431305, -0.0001951353915501386))
COS_4, COS_6, COS_8 = (tl.constexpr(c) for c in (0.04166664555668831, -0.0013887298991903663, 2.443116500217002e-05))

SQRT_HALF = tl.constexpr(0.7071067811865476)
NORMAL_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2π)


def activate(pre_tnr: Tensor, x_f_nw: Tensor, periodic: int, gelu: bool) -> Tensor | None:
    """Write [cos p, sin p, g] of one output; with `gelu`, return g, [n, v], for the gradient of the GELU.

    Args:
        pre_tnr: p | g of every rank; the first `periodic` columns are p; float32, bfloat16 or float16.
        x_f_nw: the output to write, contiguous.
    """
    ranks, tokens, rows = pre_tnr.shape
    pre_tnr = _with_rows(pre_tnr)
    g_nv = pre_tnr.new_empty(tokens, ranks * (rows - periodic)) if gelu else None
    grid, tile = _grid_and_tile(pre_tnr, periodic)
    sizes = {"RANKS": ranks, "P": periodic, "G": rows - periodic, "GELU": gelu, "PRE_STRIDE": pre_tnr.stride(1)}
    _fan_activate[grid](pre_tnr, x_f_nw, g_nv, tokens, pre_tnr.stride(0), **sizes, **tile)
    return g_nv


def differentiate(x_f_nw: Tensor, grad_nw: Tensor, g_nv: Tensor | None, grad_pre_tnr: Tensor, periodic: int) -> None:
    """Write the gradient of p | g of every rank.

    Args:
        x_f_nw: the output of `activate`, contiguous.
        grad_nw: the gradient of `x_f_nw`, with any strides.
        g_nv: the result of `activate`.
        grad_pre_tnr: the gradient to write, with consecutive columns; the first `periodic` columns are p's.
    """
    ranks, tokens, rows = grad_pre_tnr.shape
    grad_nw = _with_rows(grad_nw)
    grid, tile = _grid_and_tile(grad_pre_tnr, periodic)
    sizes = {"RANKS": ranks, "P": periodic, "G": rows - periodic, "GELU": g_nv is not None}
    strides = {"GRAD_STRIDE": grad_nw.stride(0), "GRAD_PRE_STRIDE": grad_pre_tnr.stride(1)}
    _fan_differentiate[grid](
        x_f_nw, grad_nw, g_nv, grad_pre_tnr, tokens, grad_pre_tnr.stride(0), **sizes, **strides, **tile
    )


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with consecutive columns and a row stride that kernels can take: the tensor itself, or a copy."""
    is_supported = tensor.stride(-1) == 1 and tensor.stride(-2) <= LARGEST_ROW_STRIDE
    return tensor if is_supported else tensor.contiguous()


def _grid_and_tile(pre_tnr: Tensor, periodic: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the number of programs, and the shape and the warps of their tiles, for p | g of every rank."""
    ranks, tokens, rows = pre_tnr.shape
    columns = min(TILE_COLUMNS, triton.next_power_of_2(max(periodic, rows - periodic)))
    tile_tokens = TILE_BYTES // (pre_tnr.element_size() * max(columns, 2))  # at most 2^11: see LARGEST_ROW_STRIDE
    blocks = triton.cdiv(periodic, columns) + triton.cdiv(rows - periodic, columns)
    grid = (triton.cdiv(tokens, tile_tokens) * ranks * blocks,)
    return grid, {"TILE_TOKENS": tile_tokens, "TILE_COLUMNS": columns, "num_warps": WARPS}


@triton.jit
def _cos_sin(phase):
    """Return cos and sin of float32 phases whose magnitude is at most LARGEST_REDUCED; NaN stays NaN."""
    shifted = phase * QUARTERS + ROUNDER
    quarters = shifted - ROUNDER  # a whole number of quarter turns; r is the rest of the phase
    r = ((phase - quarters * QUARTER_A) - quarters * QUARTER_B - quarters * QUARTER_C) - quarters * QUARTER_D
    square = r * r
    near_sin = r + r * square * (SIN_3 + square * (SIN_5 + square * SIN_7))
    near_cos = 1.0 - (0.5 * square - square * square * (COS_4 + square * (COS_6 + square * COS_8)))
    bits = shifted.to(tl.int32, bitcast=True)  # the last two are those of the number of quarters
    odd = (bits & 1) != 0
    cos, sin = tl.where(odd, near_sin, near_cos), tl.where(odd, near_cos, near_sin)
    return tl.where(((bits + 1) & 2) != 0, -cos, cos), tl.where((bits & 2) != 0, -sin, sin)


@triton.jit
def _place(tokens, RANKS: tl.constexpr, BLOCKS: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """Return this program's block of columns, rank and first token, the rows of its tile, and which rows are tokens."""
    program = tl.program_id(0)
    # 64 bits: a tensor may have more than 2^31 elements
    first = (program // (BLOCKS * RANKS)).to(tl.int64) * TILE_TOKENS
    rank = (program // BLOCKS % RANKS).to(tl.int64)
    rows = tl.arange(0, TILE_TOKENS)[:, None]
    return program % BLOCKS, rank, first, rows, rows < (tokens - first).to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def _fan_activate(
    pre_tnr, x_f_nw, g_nv, tokens, rank_stride,
    RANKS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, GELU: tl.constexpr, PRE_STRIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of [cos p, sin p, g], and with GELU a tile of g_nv; strides are in elements."""
    P_BLOCKS: tl.constexpr = (P + TILE_COLUMNS - 1) // TILE_COLUMNS
    BLOCKS: tl.constexpr = P_BLOCKS + (G + TILE_COLUMNS - 1) // TILE_COLUMNS
    WIDTH: tl.constexpr = RANKS * (2 * P + G)
    kind = x_f_nw.dtype.element_ty
    block, rank, first, rows, is_token = _place(tokens, RANKS, BLOCKS, TILE_TOKENS)
    pre = pre_tnr + rank * rank_stride + first * PRE_STRIDE
    x_f = x_f_nw + first * WIDTH
    columns = tl.arange(0, TILE_COLUMNS)[None, :]
    if block < P_BLOCKS:
        columns += block * TILE_COLUMNS
        mask = is_token & (columns < P)
        phase = tl.load(pre + rows * PRE_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        cos_at = x_f + rank * P + columns
        if tl.max(tl.abs(phase)) <= LARGEST_REDUCED:
            cos, sin = _cos_sin(phase)
            tl.store(cos_at + rows * WIDTH, cos.to(kind), mask=mask)
            tl.store(cos_at + rows * WIDTH + RANKS * P, sin.to(kind), mask=mask)
        else:
            # Correct for every phase, but slow; a model in training never gets here. One token at a time: for a whole
            # tile, this code would take registers from the fast path, too.
            for row in range(TILE_TOKENS):
                is_column = (columns < P) & (row < tokens - first)
                large = tl.load(pre + row * PRE_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
                tl.store(cos_at + row * WIDTH, tl.cos(large).to(kind), mask=is_column)
                tl.store(cos_at + row * WIDTH + RANKS * P, tl.sin(large).to(kind), mask=is_column)
    else:
        columns += (block - P_BLOCKS) * TILE_COLUMNS
        mask = is_token & (columns < G)
        g = tl.load(pre + P + rows * PRE_STRIDE + columns, mask=mask, other=0.0)
        if GELU:
            g_at = g_nv + first * (RANKS * G) + rank * G + rows * (RANKS * G) + columns
            tl.store(g_at, g, mask=mask)
            g = g.to(tl.float32)
            g = g * (0.5 + 0.5 * tl.erf(g * SQRT_HALF))
        tl.store(x_f + 2 * RANKS * P + rank * G + rows * WIDTH + columns, g.to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _fan_differentiate(
    x_f_nw, grad_nw, g_nv, grad_pre_tnr, tokens, rank_stride,
    RANKS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, GELU: tl.constexpr,
    GRAD_STRIDE: tl.constexpr, GRAD_PRE_STRIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradient of p | g; strides are in elements."""
    P_BLOCKS: tl.constexpr = (P + TILE_COLUMNS - 1) // TILE_COLUMNS
    BLOCKS: tl.constexpr = P_BLOCKS + (G + TILE_COLUMNS - 1) // TILE_COLUMNS
    WIDTH: tl.constexpr = RANKS * (2 * P + G)
    kind = grad_pre_tnr.dtype.element_ty
    block, rank, first, rows, is_token = _place(tokens, RANKS, BLOCKS, TILE_TOKENS)
    grad = grad_nw + first * GRAD_STRIDE
    grad_pre = grad_pre_tnr + rank * rank_stride + first * GRAD_PRE_STRIDE
    columns = tl.arange(0, TILE_COLUMNS)[None, :]
    if block < P_BLOCKS:
        columns += block * TILE_COLUMNS
        mask = is_token & (columns < P)
        cos_at = x_f_nw + first * WIDTH + rank * P + rows * WIDTH + columns
        grad_at = grad + rank * P + rows * GRAD_STRIDE + columns
        cos = tl.load(cos_at, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(cos_at + RANKS * P, mask=mask, other=0.0).to(tl.float32)
        grad_cos = tl.load(grad_at, mask=mask, other=0.0).to(tl.float32)
        grad_sin = tl.load(grad_at + RANKS * P, mask=mask, other=0.0).to(tl.float32)
        grad_p = grad_sin * cos - grad_cos * sin
        tl.store(grad_pre + rows * GRAD_PRE_STRIDE + columns, grad_p.to(kind), mask=mask)
    else:
        columns += (block - P_BLOCKS) * TILE_COLUMNS
        mask = is_token & (columns < G)
        grad_g = tl.load(grad + 2 * RANKS * P + rank * G + rows * GRAD_STRIDE + columns, mask=mask, other=0.0)
        if GELU:
            g_at = g_nv + first * (RANKS * G) + rank * G + rows * (RANKS * G) + columns
            g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
            slope = 0.5 + 0.5 * tl.erf(g * SQRT_HALF) + g * NORMAL_DENSITY_AT_0 * tl.exp(-0.5 * g * g)
            grad_g = grad_g.to(tl.float32) * slope
        tl.store(grad_pre + P + rows * GRAD_PRE_STRIDE + columns, grad_g.to(kind), mask=mask)
