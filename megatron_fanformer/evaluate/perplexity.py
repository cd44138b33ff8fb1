"""The loss of perplexity sets, in any layout.

A set's loss is the mean over its scored tokens. By the paper's chunking all chunks have as many, so that it is the mean
of the chunks' losses, too. The paper's mean over a group is that of perplexities, not exp of the mean loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_fanformer.evaluate.config import Group
from megatron_fanformer.evaluate.perplexity_sets import SETS, PerplexitySet, lengths_of, set_name
from megatron_fanformer.evaluate.rows import losses_of_rows
from megatron_fanformer.runtime.parallel import RankGrid


@dataclass(frozen=True, kw_only=True)
class SetLoss:
    """A model's loss on a set."""

    loss: float
    """Mean cross entropy of a scored token, in nats."""
    tokens: int
    """Number of scored tokens."""
    bits_per_byte: float | None
    """Bits per byte of the text; None if its bytes are not known."""
    nats_per_word: float | None = None
    """Loss of a word of the text; None if its words are not known, and but for rolling windows."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return _exp(self.loss)

    @property
    def byte_perplexity(self) -> float | None:
        """2 to the bits per byte."""
        return None if self.bits_per_byte is None else _exp(self.bits_per_byte * math.log(2))

    @property
    def word_perplexity(self) -> float | None:
        """exp of the loss of a word; infinite where that is beyond a float."""
        return None if self.nats_per_word is None else _exp(self.nats_per_word)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def perplexity_of_sets(
    stages: list[Any],
    sets: Sequence[PerplexitySet],
    grid: RankGrid,
    *,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None = None,
) -> dict[str, SetLoss]:
    """Return the loss of each set, by its name, the same on every rank; a collective call.

    Raises:
        CorruptError: a file has become shorter since it was found.
        Stopped: `shall_stop` returned true, see `losses_of_rows`.
    """

    def read(perplexity_set: PerplexitySet, pieces: np.ndarray, row: int) -> np.ndarray:
        return perplexity_set.read(pieces[row])

    losses = {}
    for perplexity_set in sets:
        pieces = perplexity_set.pieces()
        sums = losses_of_rows(
            stages,
            lengths_of(pieces),
            partial(read, perplexity_set, pieces),
            grid,
            batch_tokens=batch_tokens,
            scored=pieces[:, 3],
            shall_stop=shall_stop,
        )
        tokens = int(pieces[:, 3].sum())
        loss = float(sums.sum()) / tokens
        bits = None if perplexity_set.bytes_per_token is None else loss / math.log(2) / perplexity_set.bytes_per_token
        word_loss = None if perplexity_set.words_per_token is None else loss / perplexity_set.words_per_token
        losses[perplexity_set.name] = SetLoss(loss=loss, tokens=tokens, bits_per_byte=bits, nats_per_word=word_loss)
    return losses


def group_perplexities(losses: Mapping[str, SetLoss]) -> dict[Group, float]:
    """Return the mean perplexity of each of the paper's groups whose sets are all there."""
    return {
        group: float(np.mean([losses[set_name(group, name)].perplexity for name in names]))
        for group, names in SETS.items()
        if all(set_name(group, name) in losses for name in names)
    }


def perplexity_metrics(losses: Mapping[str, SetLoss]) -> dict[str, float]:
    """Return what a run logs of the sets, by OLMo's names."""
    metrics: dict[str, float] = {}
    for name, loss in losses.items():
        metrics[f"eval/{name}/CrossEntropyLoss"] = loss.loss
        metrics[f"eval/{name}/Perplexity"] = loss.perplexity
        if loss.bits_per_byte is not None:
            metrics[f"eval/{name}/BitsPerByte"] = loss.bits_per_byte
    return {**metrics, **{f"eval/{group}/Perplexity": mean for group, mean in group_perplexities(losses).items()}}
