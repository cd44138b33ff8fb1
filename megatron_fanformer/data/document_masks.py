"""Where documents end within samples: attention stays within them, positions begin anew, an end of text has no loss.

A document ends with its end-of-text id, in .bin and .npy files alike. (The sequences of a .bin file, which its index
bounds, need not be documents.) megatron-core's GPTDataset would look for the same id, in a loop over the documents of a
sample; it is left as it is, so that its order of samples and its cached indices are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS


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
        is_end = (item["tokens"] == self.eod_id).long()
        document_ids = is_end.cumsum(0) - is_end
        if self.reset_attention_mask:
            item[DOCUMENT_IDS] = document_ids.int()
        if self.reset_position_ids:
            first = torch.searchsorted(document_ids, document_ids)  # each document's first position
            item["position_ids"] = torch.arange(len(first)) - first
        if self.eod_mask_loss:
            item["loss_mask"] = item["loss_mask"] * (1 - is_end)
        return item
