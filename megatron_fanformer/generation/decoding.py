"""Several prompts continued together, by megatron-core's key/value cache, to the text that each has alone.

The cache gives all rows of a batch the same position, and megatron-core's causal mask has no room for padding. So a
batch begins with as many tokens as its shortest prompt has, and then goes on token by token: a row whose prompt is
longer is given its own next token until it has been read, and only then chooses one. Nothing is padded, every position
is the row's own, and a batch of prompts of about one length loses next to nothing.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from megatron_fanformer.generation.continuation import Continuation
from megatron_fanformer.generation.models import TrainedModel
from megatron_fanformer.runtime.device import return_freed_memory


def continue_all(
    model: TrainedModel,
    continuations: Sequence[Continuation],
    *,
    batch_size: int,
    tell: Callable[[int], None] = lambda ended: None,
) -> None:
    """Continue any number of prompts to their ends, in batches of prompts of about one length, the longest first.

    Args:
        tell: called after each batch, with the number of continuations that have ended.
    """
    by_length = sorted(continuations, key=lambda continuation: -continuation.length)
    for first in range(0, len(by_length), batch_size):
        continue_together(model, by_length[first : first + batch_size])
        tell(min(first + batch_size, len(by_length)))


def continue_together(
    model: TrainedModel, continuations: Sequence[Continuation], tell: Callable[[], None] = lambda: None
) -> None:
    """Continue prompts as one batch to their ends; rows that have ended leave it.

    Args:
        tell: called after each step, when some have a new token.

    Raises:
        DivergenceError: the model's logits are not finite.
    """
    return_freed_memory()  # which an earlier batch of other lengths has left
    rows = list(continuations)
    given = min(row.length for row in rows)
    decoder = model.decoder(len(rows), max(row.length + row.max_new_tokens for row in rows))
    logits_bv = decoder.next_logits(torch.tensor([row.prompt_ids[:given] for row in rows]))
    for length in itertools.count(given):  # tokens of each row in the cache
        for row, logits_v in zip(rows, logits_bv.cpu(), strict=True):
            if row.length == length:
                row.take(logits_v)
        tell()
        left = [number for number, row in enumerate(rows) if row.ended_by is None]
        if not left:
            return
        if len(left) < len(rows):
            decoder.keep(left)
            rows = [rows[number] for number in left]
        logits_bv = decoder.next_logits(torch.tensor([[row.token_at(length)] for row in rows]))
