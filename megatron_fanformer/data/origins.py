"""Origins of a sample's tokens: the runs of tokens in the token files that a dataset assembles it from.

So it is known where documents end within a sample, for masks: with their end-of-text id, in .bin and .npy files alike,
and in any case where another sequence of a .bin file begins: megatron-core shuffles those, also where a document has
several. Its GPTDataset would look for the id alone; it is left as it is, and with it the order of samples and the
cached indices.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS, RemoteSamples
from megatron_fanformer.data.chat_dataset import ChatDataset
from megatron_fanformer.data.npy_dataset import NpyDataset
from megatron_fanformer.data.npy_files import npy_prefix
from megatron_fanformer.data.staged_dataset import PairEpochs, StagedDataset, unwrapped


@dataclass(frozen=True)
class Span:
    """A run of tokens in the files of one prefix, counted in tokens from 0."""

    prefix: str
    """The path of its .bin or .npy file without that suffix."""
    first_token: int
    length: int


def sample_spans(dataset: Any, index: int) -> list[Span]:
    """Return the runs that sample `index` of a training or validation set is made from, in order.

    Together they are seq_length tokens for a .npy source; for .bin and .idx pairs one more, the last label; for chats
    a run for each conversation, and less than seq_length where there is padding.
    """
    if isinstance(dataset, RemoteSamples):
        dataset = dataset.samples
    if isinstance(dataset, ChatDataset):
        return list(_conversations(dataset, index))
    return _merged(sequence_spans(dataset, index))


def sequence_spans(dataset: Any, index: int) -> list[Span]:
    """Return `sample_spans` with the sequences of a pair one by one: neighbors need not be of one document."""
    dataset = unwrapped(dataset)
    if isinstance(dataset, StagedDataset):
        number, index = dataset.place(index)
        dataset = dataset.datasets[number]
        if isinstance(dataset, PairEpochs):
            index, dataset = dataset.number(index), dataset.samples
    while hasattr(dataset, "datasets"):  # of a blend, of two levels where sources are pairs and .npy files
        number, index = int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])
        dataset = unwrapped(dataset.datasets[number])
    if isinstance(dataset, NpyDataset):
        file, first = dataset.place(index)
        return [Span(npy_prefix(file.path), first, dataset.seq_length)]
    return [span for span in _runs(dataset, index) if span.length]


def _conversations(dataset: ChatDataset, index: int) -> Iterator[Span]:
    for number in dataset.members(index):
        chats, local = dataset.conversations.place(number)
        yield Span(chats.prefix, int(chats.starts[local]), min(int(chats.lengths[local]), dataset.seq_length))


def _runs(dataset: Any, index: int) -> Iterator[Span]:
    """Yield the part of each sequence that a GPTDataset's sample takes, by its three indices."""
    sample = int(dataset.shuffle_index[index])
    (begin, begin_offset), (end, end_offset) = (map(int, dataset.sample_index[sample + ahead]) for ahead in (0, 1))
    for place in range(begin, end + 1):
        sequence = int(dataset.document_index[place])
        first, length = dataset.dataset.place(sequence)
        offset = begin_offset if place == begin else 0
        stop = end_offset + 1 if place == end else length
        yield Span(dataset.dataset_path, first + offset, stop - offset)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same tokens, with adjacent runs of a file merged."""
    merged: list[Span] = []
    for span in spans:
        if merged and (merged[-1].prefix, merged[-1].first_token + merged[-1].length) == (
            span.prefix,
            span.first_token,
        ):
            last = merged.pop()
            span = Span(last.prefix, last.first_token, last.length + span.length)
        merged.append(span)
    return merged


# -- documents within a sample


@dataclass(frozen=True)
class DocumentSamples:
    """A dataset's samples, in its order, with the marks of documents that `DataConfig` requests.

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
        """Return the sample's own tensors, [seq_length] each, and, under `reset_attention_mask`, `document_ids`
        (int32).
        """
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
        """Return the positions at which another sequence of its token files begins, but for the first."""
        spans = sequence_spans(self.samples, index)
        starts = itertools.accumulate(span.length for span in spans)
        return [start for start in starts if start < length]


# -- repetitive samples

LONGEST_PERIOD = 13
LEAST_TIMES = 32


def is_repetitive(tokens: np.ndarray, *, longest_period: int = LONGEST_PERIOD, least_times: int = LEAST_TIMES) -> bool:
    """Return whether up to `longest_period` tokens stand `least_times` times in a row somewhere in `tokens` [n].

    The rule is OLMo-core's (its `InstanceFilterConfig`): such samples, of rulers, tables of zeros and the like, cause
    spikes of the loss.
    """
    for period in range(1, longest_period + 1):
        needed = period * (least_times - 1)  # tokens in a row, each as the one a period before it
        is_same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(is_same) < needed:
            continue
        breaks = np.flatnonzero(~is_same)
        if np.diff(breaks, prepend=-1, append=len(is_same)).max() > needed:
            return True
    return False


@dataclass(frozen=True)
class UnrepeatedSamples:
    """A dataset's samples, in its order; those that are repetitive have no loss."""

    samples: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample's own tensors, with a `loss_mask` of zeros where its tokens are repetitive."""
        item: dict[str, Tensor] = {**self.samples[index]}
        if is_repetitive(item["tokens"].numpy()):
            item["loss_mask"] = item["loss_mask"] * 0
        return item
