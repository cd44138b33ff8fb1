"""The same model with its numbers in another order, which shows the differences that rounding alone makes.

A Transformer is not changed by relabelling: the coordinates of the residual stream, the units of the MLP, the rows of
a FAN map within `p` and within `g`, the query groups, the vocabulary, and the samples of a batch can each be
permuted, together with all the weights that refer to them. Every value is the same as before; only the order in which
sums are taken differs. So two such runs differ by what the order of sums explains, and by nothing else: that is the
noise that a parallel layout, which reorders sums too, is allowed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.seeding import generator_for

Permutations = list[Tensor | None]
"""One per axis of a tensor; None leaves it as it is."""


@dataclass(frozen=True)
class Reordering:
    """One permutation of everything that can be permuted; `number` 0 is the original order."""

    model: FANformerConfig
    global_batch_size: int
    number: int

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole weight, by its global name, in this order."""
        for axis, order in enumerate(self._axes(name)):
            tensor = tensor if order is None else tensor.index_select(axis, order)
        return tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole weight or its gradient, of this order, in the original order."""
        for axis, order in enumerate(self._axes(name)):
            tensor = tensor if order is None else tensor.index_select(axis, order.argsort())
        return tensor

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return token ids as this order's vocabulary has them."""
        return self.vocabulary.argsort()[tokens]

    def sample(self, position: int) -> int:
        """Return which sample is at a position of the stream: permuted within each global batch."""
        batch, place = divmod(position, self.global_batch_size)
        return batch * self.global_batch_size + int(self.order("samples", self.global_batch_size)[place])

    @property
    def vocabulary(self) -> Tensor:
        """The order of the embedding's rows, padding included."""
        return self.order("vocabulary", self.model.padded_vocab_size)

    @property
    def hidden(self) -> Tensor:
        """The order of the residual stream's coordinates: of a FAN layer's features, where one writes them."""
        size = self.model.hidden_size
        return self.features("stream", size) if self.model.placement.has_fan_mlp else self.order("hidden", size)

    @property
    def x_f(self) -> Tensor:
        """The order of X_F's coordinates."""
        return self.features("x_f", self.model.hidden_size)

    def features(self, name: str, width: int) -> Tensor:
        """Return the order of a FAN layer's output of that width: cos and sin move together."""
        periodic, linear = self._units(name, width)
        return torch.cat([periodic, len(periodic) + periodic, 2 * len(periodic) + linear])

    def fan_rows(self, name: str, width: int) -> Tensor:
        """Return the order of the rows [p | g] that make such an output."""
        periodic, linear = self._units(name, width)
        return torch.cat([periodic, len(periodic) + linear])

    def _units(self, name: str, width: int) -> tuple[Tensor, Tensor]:
        periodic = int(self.model.fan.p_ratio * width)
        return self.order(f"{name}, p", periodic), self.order(f"{name}, g", width - 2 * periodic)

    def _axes(self, name: str) -> Permutations:
        hidden, placement = self.hidden, self.model.placement
        qkv_rows, channels = self.model.qkv_rows, self.model.num_attention_heads * self.model.kv_channels
        width = self.model.ffn_hidden_size
        fan_rows = self.fan_rows("x_f", self.model.hidden_size)
        units = self.order("ffn", width)
        rules: dict[str, Permutations] = {
            "word_embeddings.weight": [self.vocabulary, hidden],
            "output_layer.weight": [self.vocabulary, hidden],
            # The channels of a head stay: rotary positions turn each by an angle of its own.
            "q_layernorm.weight": [None],
            "k_layernorm.weight": [None],
            "linear_qkv.weight": [self._of_groups(qkv_rows), self.x_f if placement.is_in_attention else hidden],
            "linear_proj.weight": [hidden, self._of_groups(channels)],
            "fan.linear.weight": [fan_rows, hidden],
            "fan.linear.bias": [fan_rows],
            # Rows of values are channels of heads.
            "fan.v_linear.weight": [None, hidden],
            "fan.v_linear.bias": [None],
            "linear_qk.weight": [None, self.x_f],
            "linear_fc1.weight": [torch.cat([units, len(units) + units]), hidden],
            "linear_fc2.weight": [hidden, units],
        }
        if placement.has_fan_mlp:
            inner, outer = self.fan_rows("ffn", width), self.fan_rows("stream", self.model.hidden_size)
            rules["linear_fc1.weight"], rules["linear_fc1.bias"] = [inner, hidden], [inner]
            rules["linear_fc2.weight"], rules["linear_fc2.bias"] = [outer, self.features("ffn", width)], [outer]
        return next((axes for part, axes in rules.items() if part in name), [hidden])  # else a norm

    def _of_groups(self, rows: int) -> Tensor | None:
        """Return the order of `rows` rows, of which each query group has an equal number."""
        if self.model.placement.has_own_values:
            return None  # a value's channel is a cosine, a sine or linear, and its head cannot move
        order = self.order("groups", self.model.query_groups)
        return torch.arange(rows).view(len(order), -1)[order].flatten()

    def order(self, name: str, size: int) -> Tensor:
        """Return an order of so many units of that name."""
        if self.number == 0:
            return torch.arange(size)
        return torch.randperm(size, generator=generator_for(self.number, name))
