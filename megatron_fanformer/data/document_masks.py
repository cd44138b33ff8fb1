"""Where documents end within samples: attention stays within them, positions begin anew, an end of text has no loss.

A document ends with its end-of-text id, in .bin and .npy files alike, and in any case where another sequence of a .bin
file begins: megatron-core shuffles those, also where a document has several. Its GPTDataset would look for the id
alone; it is left as it is, and with it the order of samples and the cached indices.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS
from megatron_fanformer.data.origins import sequence_spans


@dataclass(frozen=True, kw_only=True)
class DocumentSamples:
    """A dataset's samples, in its order, with what `DataConfig` asks for about the documents within them.

    An end-of-text token belongs to the document that it ends. Under `eod_mask_loss` it is the position that reads one
    which has no loss, as in Megatron: its label is the first token of the next document.
    """

    samples: Any
    eod_id: int
    reset_attention_mask: bool
    reset_position_ids: bool
    eod_mask_loss: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The sample's own tensors, [seq_length] each, and, under `reset_attention_mask`, `document_ids` (int32)."""
        item: dict[str, Tensor] = {**self.samples[index]}
        is_end = item["tokens"] == self.eod_id
        begins = is_end.roll(1).long()
        begins[[0, *self._sequence_starts(index, len(begins))]] = 1
        document_ids = begins.cumsum(0) - 1
        if self.reset_attention_mask:
            item[DOCUMENT_IDS] = document_ids.int()
        if self.reset_position_ids:
            first = torch.searchsorted(document_ids, document_ids)  # each document's first position
            item["position_ids"] = torch.arange(len(first)) - first
        if self.eod_mask_loss:
            item["loss_mask"] = item["loss_mask"] * ~is_end
        return item

    def _sequence_starts(self, index: int, length: int) -> list[int]:
        """The positions at which another sequence of its token files begins, but for the first."""
        spans = sequence_spans(self.samples, index)
        starts = itertools.accumulate(span.length for span in spans)
        return [start for start in starts if start < length]
