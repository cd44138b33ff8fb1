"""Permutes a model's parts without changing the model, to measure the differences that rounding alone makes.

A Transformer computes the same function after a permutation of the coordinates of the residual stream, the units of the
MLP, the rows of a FAN map within `p` and within `g`, the query groups or the vocabulary, if all weights that refer to
them are permuted, too; and the samples of a batch may come in any order. Only the order of sums changes. So a reordered
run differs from the original one only by rounding, as may a layout, which changes the order of sums, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.seeding import generator_for

Permutations = list[Tensor | None]
"""A permutation for each axis of a tensor; None: the axis keeps its order."""


@dataclass(frozen=True)
class Reordering:
    """A permutation of all parts that can be permuted; `number` selects it, and 0 is the original order."""

    model: FANformerConfig
    global_batch_size: int
    number: int

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Bring a whole weight from the original order into this one; `name` is the weight's name in the model."""
        for axis, order in enumerate(self._axes(name)):
            tensor = tensor if order is None else tensor.index_select(axis, order)
        return tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """Bring a whole weight or gradient from this order into the original one."""
        for axis, order in enumerate(self._axes(name)):
            tensor = tensor if order is None else tensor.index_select(axis, order.argsort())
        return tensor

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return the ids that tokens of the original vocabulary have in the reordered vocabulary."""
        return self.vocabulary.argsort()[tokens]

    def sample(self, position: int) -> int:
        """Return the number of the sample at a position of the stream; samples move within their global batch."""
        batch, place = divmod(position, self.global_batch_size)
        return batch * self.global_batch_size + int(self.order("samples", self.global_batch_size)[place])

    @property
    def vocabulary(self) -> Tensor:
        """The order of the embedding's rows, padding included."""
        return self.order("vocabulary", self.model.padded_vocab_size)

    @property
    def hidden(self) -> Tensor:
        """The order of the residual stream's coordinates, which in placement `ffn` are features of FAN layers."""
        size = self.model.hidden_size
        return self.features("stream", size) if self.model.placement.has_fan_mlp else self.order("hidden", size)

    @property
    def x_f(self) -> Tensor:
        """The order of the coordinates of X_F, the FAN map's output before attention."""
        return self.features("x_f", self.model.hidden_size)

    def features(self, name: str, width: int) -> Tensor:
        """Return the order of a FAN layer's features [cos | sin | linear]; the cos and sin of a row move together."""
        periodic, linear = self._units(name, width)
        return torch.cat([periodic, len(periodic) + periodic, 2 * len(periodic) + linear])

    def fan_rows(self, name: str, width: int) -> Tensor:
        """Return the order of a FAN layer's rows [p | g], whose features have the order `features(name, width)`."""
        periodic, linear = self._units(name, width)
        return torch.cat([periodic, len(periodic) + linear])

    def _units(self, name: str, width: int) -> tuple[Tensor, Tensor]:
        """Return the orders of the periodic and of the linear rows of a FAN layer with `width` features."""
        periodic = int(self.model.fan.p_ratio * width)
        return self.order(f"{name}, p", periodic), self.order(f"{name}, g", width - 2 * periodic)

    def _axes(self, name: str) -> Permutations:
        """Return the order of each axis of a weight, given the weight's name in the whole model."""
        hidden, placement = self.hidden, self.model.placement
        qkv_rows, channels = self.model.qkv_rows, self.model.num_attention_heads * self.model.kv_channels
        ffn_width = self.model.ffn_hidden_size
        fan_rows = self.fan_rows("x_f", self.model.hidden_size)
        units = self.order("ffn", ffn_width)
        rules: dict[str, Permutations] = {
            "word_embeddings.weight": [self.vocabulary, hidden],
            "output_layer.weight": [self.vocabulary, hidden],
            # Channels within a head keep their order: rotary positions rotate each channel by another angle.
            "q_layernorm.weight": [None],
            "k_layernorm.weight": [None],
            "linear_qkv.weight": [self._group_rows(qkv_rows), self.x_f if placement.is_in_attention else hidden],
            "linear_proj.weight": [hidden, self._group_rows(channels)],
            "fan.linear.weight": [fan_rows, hidden],
            "fan.linear.bias": [fan_rows],
            # Where a FAN layer makes the values, query groups keep their order, too: see `_group_rows`.
            "fan.v_linear.weight": [None, hidden],
            "fan.v_linear.bias": [None],
            "linear_qk.weight": [None, self.x_f],
            "linear_fc1.weight": [torch.cat([units, len(units) + units]), hidden],  # [gate | up]
            "linear_fc2.weight": [hidden, units],
        }
        if placement.has_fan_mlp:
            inner, outer = self.fan_rows("ffn", ffn_width), self.fan_rows("stream", self.model.hidden_size)
            rules["linear_fc1.weight"], rules["linear_fc1.bias"] = [inner, hidden], [inner]
            rules["linear_fc2.weight"], rules["linear_fc2.bias"] = [outer, self.features("ffn", ffn_width)], [outer]
        return next((axes for part, axes in rules.items() if part in name), [hidden])  # all other weights are norms

    def _group_rows(self, rows: int) -> Tensor | None:
        """Return the order of `rows` rows, which query groups divide equally; None if groups cannot be permuted."""
        if self.model.placement.has_own_values:
            return None  # the head decides whether a channel of its values is a cosine, a sine or linear
        order = self.order("groups", self.model.query_groups)
        return torch.arange(rows).view(len(order), -1)[order].flatten()

    def order(self, name: str, size: int) -> Tensor:
        """Return a random order of `size` things, which `name` and the number of this reordering determine."""
        if self.number == 0:
            return torch.arange(size)
        return torch.randperm(size, generator=generator_for(self.number, name))
