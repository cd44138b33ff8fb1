"""Samples of .npy files and of chats, the places of a sample's tokens in the token files, and marks of documents.

A document ends with its end-of-text id, in .bin and .npy files alike. It also ends where a sample goes on with another
sequence of a .bin file, since megatron-core shuffles sequences, even those of one document. megatron-core's GPTDataset
would look for the id alone. DocumentSamples wraps it, which keeps the order of samples and the cached indices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS
from megatron_fanformer.data.chats import Conversations, pack
from megatron_fanformer.data.mixes import MixDataset, PairEpochs, unwrap
from megatron_fanformer.data.sample_order import Epochs, SampleWrapper
from megatron_fanformer.data.token_files import NpyFile, npy_prefix, refuse_ids_read, whole_samples


class NpyDataset(Epochs):
    """Samples of .npy files in the order of the authors' loader, which depends on the files, seq_length and the seed.

    A file is cut into samples of seq_length tokens from its beginning on. A rest that is shorter is not used.
    """

    def __init__(
        self, files: list[NpyFile], *, seq_length: int, seed: int, vocab_size: int, samples: int | None = None
    ) -> None:
        """`samples` is the length of the dataset; None: one epoch. `vocab_size` bounds the ids that are read."""
        super().__init__(whole_samples(files, seq_length), seed=seed, samples=samples)
        self.files, self.seq_length, self._vocab_size = files, seq_length, vocab_size
        self._ends = np.cumsum([file.tokens // seq_length for file in files], dtype=np.int64)  # in samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [seq_length].

        The label of a position is the next token of the sample. The last position has none, and its mask is 0.
        Raises CorruptError if an id is not below the vocabulary size.
        """
        file, first = self.locate(index)
        ids = file.read(first, self.seq_length)
        refuse_ids_read(ids, self._vocab_size, file.path, first)
        tokens = torch.from_numpy(ids.astype(np.int64))
        mask = torch.ones(self.seq_length)
        mask[-1] = 0.0
        labels = tokens.roll(-1)
        labels[-1] = 0  # any id within the vocabulary
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(self.seq_length)}

    def locate(self, index: int) -> tuple[NpyFile, int]:
        """Return the file of a sample, and the number of the sample's first token in that file."""
        sample = self.number(index)
        file_number = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[file_number - 1]) if file_number else 0
        return self.files[file_number], (sample - before) * self.seq_length


class ChatDataset(Epochs):
    """Samples of chats for fine-tuning: whole conversations packed to seq_length. Each one is a document.

    The inputs are all tokens of the conversations. The label of a token is the next token of the same conversation; the
    last token of a conversation has none. The mask in the files says whether a label has a loss.
    Sample n depends on the files, their order, seq_length and the seed alone.
    """

    def __init__(
        self, conversations: Conversations, *, seq_length: int, seed: int, vocab_size: int, samples: int | None = None
    ) -> None:
        """`samples` is the length of the dataset; None: one epoch. `vocab_size` bounds the ids that are read."""
        self.conversations, self.seq_length, self._vocab_size = conversations, seq_length, vocab_size
        self._packing = pack(conversations.lengths, seq_length, seed=seed)
        super().__init__(len(self._packing), seed=seed, samples=samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), `document_ids` (int32).

        Each is [seq_length]. After the last conversation, a document of zeros without a loss fills the sample.
        Raises CorruptError if an id is not below the vocabulary size, or if a conversation's mask is wrong.
        """
        tokens, labels, positions = (np.zeros(self.seq_length, np.int64) for _ in range(3))
        mask, documents = np.zeros(self.seq_length, np.float32), np.zeros(self.seq_length, np.int32)
        begin, members = 0, self.members(index)
        for document, number in enumerate(members):
            chats, number_in_files = self.conversations.locate(number)
            ids, learned = (values[: self.seq_length] for values in chats[number_in_files])
            refuse_ids_read(ids, self._vocab_size, chats.ids_path, int(chats.starts[number_in_files]))
            end = begin + len(ids)
            tokens[begin:end], positions[begin:end], documents[begin:end] = ids, np.arange(len(ids)), document
            labels[begin : end - 1], mask[begin : end - 1] = ids[1:], learned[1:]
            begin = end
        positions[begin:], documents[begin:] = np.arange(self.seq_length - begin), len(members)
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in {**arrays, DOCUMENT_IDS: documents}.items()}

    def members(self, index: int) -> Sequence[int]:
        """Return the numbers of a sample's conversations, in their order within the sample."""
        return list(map(int, self._packing.conversations(self.number(index))))


# -- where a sample's tokens are in the token files


@dataclass(frozen=True)
class Span:
    """A run of consecutive tokens in one .bin or .npy file."""

    prefix: str
    """The path of the file, without .bin or .npy."""
    first_token: int
    length: int


def sample_spans(dataset: Any, index: int) -> list[Span]:
    """Return the runs of tokens, in order, that make up sample `index` of a training or validation set.

    Together they have seq_length tokens for .npy files; one more, the last label, for pairs; fewer for padded chats.
    """
    dataset = unwrap(dataset)
    if isinstance(dataset, ChatDataset):
        places = map(dataset.conversations.locate, dataset.members(index))
        return [
            Span(chats.prefix, int(chats.starts[number]), min(int(chats.lengths[number]), dataset.seq_length))
            for chats, number in places
        ]
    merged: list[Span] = []
    for span in sequence_spans(dataset, index):
        last = merged[-1] if merged else None
        if last is not None and (last.prefix, last.first_token + last.length) == (span.prefix, span.first_token):
            merged[-1] = Span(last.prefix, last.first_token, last.length + span.length)
        else:
            merged.append(span)
    return merged


def sequence_spans(dataset: Any, index: int) -> list[Span]:
    """Return the runs of tokens of a sample of pairs or .npy files; two sequences of a pair never share a run."""
    dataset = unwrap(dataset)
    if isinstance(dataset, MixDataset):
        source, index = dataset.locate(index)
        dataset = dataset.datasets[source]
        if isinstance(dataset, PairEpochs):
            index, dataset = dataset.number(index), dataset.first_epoch
    while hasattr(dataset, "datasets"):  # a blend; one of pairs and .npy files may hold another blend
        source, index = int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])
        dataset = unwrap(dataset.datasets[source])
    if isinstance(dataset, NpyDataset):
        file, first = dataset.locate(index)
        return [Span(npy_prefix(file.path), first, dataset.seq_length)]
    return [span for span in _pair_spans(dataset, index) if span.length]  # a sequence may be empty


def _pair_spans(dataset: Any, index: int) -> Iterator[Span]:
    """Yield the run that a sample of megatron-core's GPTDataset takes of each sequence, by the dataset's indices."""
    sample = int(dataset.shuffle_index[index])
    # Row n of sample_index is where sample n begins: a place in document_index, which lists sequences, and an offset in
    # the sequence there. The last label of a sample is the first token of the next sample.
    (begin, begin_offset), (end, end_offset) = (map(int, row) for row in dataset.sample_index[sample : sample + 2])
    for place in range(begin, end + 1):
        sequence = int(dataset.document_index[place])
        first, length = dataset.dataset.locate(sequence)
        offset = begin_offset if place == begin else 0
        stop = end_offset + 1 if place == end else length
        yield Span(dataset.dataset_path, first + offset, stop - offset)


# -- documents within a sample


@dataclass(frozen=True)
class DocumentSamples(SampleWrapper):
    """The samples of a dataset with the marks of documents that `DataConfig` requests.

    An end-of-text token belongs to the document that it ends. Under `eod_mask_loss`, as in Megatron, a position whose
    input is the end of text has no loss: its label would be the first token of the next document.
    """

    eod_id: int
    reset_attention_mask: bool
    eod_mask_loss: bool

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample's tensors, each [seq_length]; under `reset_attention_mask` also `document_ids` (int32)."""
        item: dict[str, Tensor] = {**self.samples[index]}
        is_end = item["tokens"] == self.eod_id
        # 1 where a document begins: after an end of text, and where the sample or a sequence begins.
        begins = is_end.roll(1).long()
        starts = [0, *itertools.accumulate(span.length for span in sequence_spans(self.samples, index))]
        begins[[start for start in starts if start < len(begins)]] = 1  # the last start is the end of all spans
        if self.reset_attention_mask:
            item[DOCUMENT_IDS] = (begins.cumsum(0) - 1).int()
        if self.eod_mask_loss:
            item["loss_mask"] = item["loss_mask"] * ~is_end
        return item
