"""The machine's rate in the matrix products of a model, with which a training step is compared.

Each weight [n, k] takes part in three products for a micro batch of m tokens: [m, k] x [k, n] forward, [m, n] x [n, k]
for the input's gradient, and [n, m] x [m, k] for the weight's gradient, which is added to a float32 sum.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.ops.matrices import add_product

REPEATS = 3
MORE_THAN_CACHED = 64 << 20  # bytes
LEAST_SECONDS = 0.02  # of one timing: a product may take microseconds


class Weight(NamedTuple):
    """One matrix of the model."""

    rows: int
    columns: int


def weights_of(model: FANformerConfig) -> list[Weight]:
    """Return the matrices of one layer and of the head."""
    h = model.hidden_size
    heads = model.num_attention_heads * model.kv_channels
    fan = [Weight(model.fan_rows, h)] if model.has_fan else []
    return [
        *fan,
        Weight(model.qkv_rows, h),
        Weight(h, heads),  # the attention's output
        *(Weight(rows, columns) for rows, columns in model.ffn_maps),
        Weight(model.padded_vocab_size, h),
    ]


class Rates(NamedTuple):
    """FLOP/s of a model's products."""

    fastest: float
    """The fastest product's, repeated with the same operands."""
    mean: float
    """The mean over all products of a step, with operands that are in no cache, as most operands of a step."""


class MatrixClock:
    """Times a model's products.

    Args:
        tokens: number of tokens of a micro batch.
    """

    def __init__(self, model: FANformerConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._tokens, self._dtype, self._device = weights_of(model), tokens, dtype, device
        *layer, _ = self._weights
        self._times = [model.num_layers] * len(layer) + [1]  # the last is the head's

    def rates(self) -> "Rates":
        """Return the current rates; each product counts with the best of a few timings."""
        fastest = flops = seconds = 0.0
        for weight, times in zip(self._weights, self._times, strict=True):
            product_flops = 2 * self._tokens * weight.rows * weight.columns
            several = [self._products(weight) for _ in range(self._copies(weight))]
            for alike in zip(*several, strict=True):
                taken = min(timed(alike[0], self._device) for _ in range(REPEATS))
                fastest = max(fastest, product_flops / taken)
                if len(alike) > 1:
                    in_turn = partial(next, itertools.cycle(alike))
                    taken = min(timed(lambda take=in_turn: take()(), self._device) for _ in range(REPEATS))
                flops, seconds = flops + times * product_flops, seconds + times * taken
        return Rates(fastest, flops / seconds)

    def _copies(self, weight: Weight) -> int:
        """Return how many sets of operands together exceed all caches."""
        elements = self._tokens * (weight.rows + weight.columns) + weight.rows * weight.columns
        return max(1, MORE_THAN_CACHED // (elements * self._dtype.itemsize))

    def _products(self, weight: Weight) -> list[Callable[[], object]]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=self._dtype, device=self._device)

        x, w = random(self._tokens, weight.columns), random(weight.rows, weight.columns)
        grad = random(self._tokens, weight.rows)
        sums = torch.zeros(weight.rows, weight.columns, device=self._device)
        return [lambda: F.linear(x, w), lambda: grad @ w, lambda: add_product(sums, grad, x)]


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a call, over as many calls as the clock can resolve; a first call is not counted."""
    once = _seconds(function, 1, device)
    calls = max(1, round(LEAST_SECONDS / max(once, 1e-9)))
    return _seconds(function, calls, device)


def _seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - started) / calls
