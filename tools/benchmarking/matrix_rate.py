"""The machine's own rate in the matrix products of a model: what a training step is compared with.

Each weight [n, k] makes three products a micro batch of m tokens: [m, k] x [k, n] forward, [m, n] x [n, k] for the
input's gradient and [n, m] x [m, k] for its own.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig

REPEATS = 3
LEAST_SECONDS = 0.02  # of one timing: a product may take microseconds


class Weight(NamedTuple):
    """One matrix of the model."""

    rows: int
    columns: int


def weights_of(model: FANformerConfig) -> list[Weight]:
    """Every matrix of a model; those of a layer once."""
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
    """Of the fastest product."""
    mean: float
    """Of all products of a step together."""


class MatrixClock:
    """Times a model's products, again and again.

    Args:
        tokens: of a micro batch.
    """

    def __init__(self, model: FANformerConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._tokens, self._dtype, self._device = weights_of(model), tokens, dtype, device
        *layer, _ = self._weights
        self._times = [model.num_layers] * len(layer) + [1]  # the last is the head's

    def rates(self) -> "Rates":
        """The rates at present, each product's by the best of a few timings."""
        fastest = flops = seconds = 0.0
        for weight, times in zip(self._weights, self._times, strict=True):
            own = 2 * self._tokens * weight.rows * weight.columns
            for product in self._products(weight):
                taken = min(timed(product, self._device) for _ in range(REPEATS))
                fastest = max(fastest, own / taken)
                flops, seconds = flops + times * own, seconds + times * taken
        return Rates(fastest, flops / seconds)

    def _products(self, weight: Weight) -> list[Callable[[], Tensor]]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=self._dtype, device=self._device)

        x, w = random(self._tokens, weight.columns), random(weight.rows, weight.columns)
        grad = random(self._tokens, weight.rows)
        return [lambda: F.linear(x, w), lambda: grad @ w, lambda: grad.t() @ x]


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, as a mean over enough that the clock can resolve them; the first is excluded."""
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
