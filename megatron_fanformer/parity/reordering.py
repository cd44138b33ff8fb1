"""The same model with its numbers in another order: what rounding alone can change.

A Transformer is not changed by relabelling: the coordinates of the residual stream, the units of the MLP, the rows of
the FAN map within `p` and within `g`, the query groups, the vocabulary, and the samples of a batch can each be
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
        """A whole weight, by its global name, in this order."""
        for axis, order in enumerate(self._axes(name)):
            if order is not None:
                tensor = tensor.index_select(axis, order)
        return tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """A whole weight or its gradient, of this order, in the original order."""
        for axis, order in enumerate(self._axes(name)):
            if order is not None:
                tensor = tensor.index_select(axis, order.argsort())
        return tensor

    def tokens(self, tokens: Tensor) -> Tensor:
        """Token ids as this order's vocabulary has them."""
        order = self.vocabulary
        return tokens if order is None else order.argsort()[tokens]

    def sample(self, position: int) -> int:
        """Which sample is at a position of the stream: permuted within each global batch."""
        batch, place = divmod(position, self.global_batch_size)
        order = self._order("samples", self.global_batch_size)
        return position if order is None else batch * self.global_batch_size + int(order[place])

    @property
    def vocabulary(self) -> Tensor | None:
        """The order of the embedding's rows, padding included."""
        return self._order("vocabulary", self.model.padded_vocab_size)

    @property
    def hidden(self) -> Tensor | None:
        """The order of the residual stream's coordinates."""
        return self._order("hidden", self.model.hidden_size)

    @property
    def x_f(self) -> Tensor | None:
        """The order of X_F's coordinates: cos and sin move together."""
        model = self.model
        periodic, linear = self._order("periodic", model.periodic_size), self._order("linear", model.linear_size)
        if periodic is None or linear is None:
            return None
        size = model.periodic_size
        return torch.cat([periodic, size + periodic, 2 * size + linear])

    def _axes(self, name: str) -> Permutations:
        for part, axes in self._rules().items():
            if part in name:
                return axes
        return [self.hidden]  # a norm

    def _rules(self) -> dict[str, Permutations]:
        hidden = self.hidden
        return {
            "word_embeddings.weight": [self.vocabulary, hidden],
            "output_layer.weight": [self.vocabulary, hidden],
            "fan.linear.weight": [self._fan_rows(), hidden],
            "fan.linear.bias": [self._fan_rows()],
            # Rows of the values' own map are channels of heads, and stay where those need them.
            "fan.v_linear.weight": [None, hidden],
            "fan.v_linear.bias": [None],
            "linear_qkv.weight": [self._qkv_rows(), self.x_f if self.model.has_fan else hidden],
            "linear_qk.weight": [None, self.x_f],
            "linear_proj.weight": [hidden, self._attention_channels()],
            "linear_fc1.weight": [self._gate_and_up(), hidden],
            "linear_fc2.weight": [hidden, self._order("ffn", self.model.ffn_hidden_size)],
        }

    def _fan_rows(self) -> Tensor | None:
        periodic = self._order("periodic", self.model.periodic_size)
        linear = self._order("linear", self.model.linear_size)
        return None if periodic is None or linear is None else torch.cat([periodic, len(periodic) + linear])

    def _groups(self) -> Tensor | None:
        # At qk_and_v a value's channel says whether it is a cosine, a sine or linear: its head cannot move.
        return None if self.model.fan.placement == "qk_and_v" else self._order("groups", self.model.query_groups)

    def _qkv_rows(self) -> Tensor | None:
        return self._blocks(self._groups(), self.model.qkv_rows)

    def _attention_channels(self) -> Tensor | None:
        return self._blocks(self._groups(), self.model.num_attention_heads * self.model.kv_channels)

    @staticmethod
    def _blocks(order: Tensor | None, rows: int) -> Tensor | None:
        """The order of `rows` rows, of which each query group has an equal number."""
        return None if order is None else torch.arange(rows).view(len(order), -1)[order].flatten()

    def _gate_and_up(self) -> Tensor | None:
        order = self._order("ffn", self.model.ffn_hidden_size)
        return None if order is None else torch.cat([order, len(order) + order])

    def _order(self, what: str, size: int) -> Tensor | None:
        if self.number == 0:
            return None
        return torch.randperm(size, generator=generator_for(self.number, what))
