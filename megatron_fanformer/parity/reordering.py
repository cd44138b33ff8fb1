"""The same model with its numbers in another order: what rounding alone can change.

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
            if order is not None:
                tensor = tensor.index_select(axis, order)
        return tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole weight or its gradient, of this order, in the original order."""
        for axis, order in enumerate(self._axes(name)):
            if order is not None:
                tensor = tensor.index_select(axis, order.argsort())
        return tensor

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return token ids as this order's vocabulary has them."""
        order = self.vocabulary
        return tokens if order is None else order.argsort()[tokens]

    def sample(self, position: int) -> int:
        """Return which sample is at a position of the stream: permuted within each global batch."""
        batch, place = divmod(position, self.global_batch_size)
        order = self.order("samples", self.global_batch_size)
        return position if order is None else batch * self.global_batch_size + int(order[place])

    @property
    def vocabulary(self) -> Tensor | None:
        """The order of the embedding's rows, padding included."""
        return self.order("vocabulary", self.model.padded_vocab_size)

    @property
    def hidden(self) -> Tensor | None:
        """The order of the residual stream's coordinates."""
        return self.model.placement.stream_order(self)

    @property
    def x_f(self) -> Tensor | None:
        """The order of X_F's coordinates."""
        return self.features("x_f", self.model.hidden_size)

    def features(self, what: str, width: int) -> Tensor | None:
        """Return the order of what a FAN layer makes, so wide: cos and sin move together."""
        periodic, linear = self._units(what, width)
        if periodic is None or linear is None:
            return None
        return torch.cat([periodic, len(periodic) + periodic, 2 * len(periodic) + linear])

    def fan_rows(self, what: str, width: int) -> Tensor | None:
        """Return the order of the rows [p | g] that make it."""
        periodic, linear = self._units(what, width)
        return None if periodic is None or linear is None else torch.cat([periodic, len(periodic) + linear])

    def _units(self, what: str, width: int) -> tuple[Tensor | None, Tensor | None]:
        periodic = int(self.model.fan.p_ratio * width)
        return self.order(f"{what}, p", periodic), self.order(f"{what}, g", width - 2 * periodic)

    def _axes(self, name: str) -> Permutations:
        hidden, placement = self.hidden, self.model.placement
        channels = self.model.num_attention_heads * self.model.kv_channels
        rules: dict[str, Permutations] = {
            "word_embeddings.weight": [self.vocabulary, hidden],
            "output_layer.weight": [self.vocabulary, hidden],
            **placement.attention_orders(self),
            "linear_proj.weight": [hidden, self._of_groups(channels)],
            **placement.mlp_orders(self),
        }
        return next((axes for part, axes in rules.items() if part in name), [hidden])  # else a norm

    def qkv_rows(self) -> Tensor | None:
        """Return the order of the rows of QKV, which query groups move with."""
        return self._of_groups(self.model.qkv_rows)

    def _of_groups(self, rows: int) -> Tensor | None:
        """Return the order of `rows` rows, of which each query group has an equal number."""
        order: Tensor | None = self.model.placement.group_order(self)
        return None if order is None else torch.arange(rows).view(len(order), -1)[order].flatten()

    def gate_and_up(self) -> Tensor | None:
        """Return the order of the rows of a SwiGLU's gate and up."""
        order = self.order("ffn", self.model.ffn_hidden_size)
        return None if order is None else torch.cat([order, len(order) + order])

    def order(self, what: str, size: int) -> Tensor | None:
        """Return an order of so many, by the name of what they are; None for the original."""
        if self.number == 0:
            return None
        return torch.randperm(size, generator=generator_for(self.number, what))
