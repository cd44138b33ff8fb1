"""Samples of .npy files and of chats, the marks of documents within samples, and the tokens that a sample is made of.

Document masks need the runs of tokens that a sample is made of: a document ends with its end-of-text id, in .bin and
.npy files alike, and in any case where another sequence of a .bin file begins: megatron-core shuffles those, also where
a document has several. Its GPTDataset would look for the id alone; it is left as it is, and with it the order of
samples and the cached indices.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS, RemoteSamples
from megatron_fanformer.data.chats import Conversations, pack
from megatron_fanformer.data.mixes import MixDataset, PairEpochs, unwrapped
from megatron_fanformer.data.sample_order import Epochs
from megatron_fanformer.data.token_files import NpyFile, npy_prefix, refuse_ids_read, whole_samples


class NpyDataset(Epochs):
    """Samples of .npy files, in the order of the authors' loader, which their files, seq_length and the seed decide.

    A sample is a run of seq_length tokens of one file, cut from its beginning on; a file's tail that is shorter than a
    sample is not used.
    """

    def __init__(
        self,
        files: list[NpyFile],
        *,
        seq_length: int,
        seed: int,
        vocab_size: int,
        samples: int | None = None,
    ) -> None:
        """See Epochs; ids are below `vocab_size`, or CorruptError is raised where one is read."""
        super().__init__(whole_samples(files, seq_length), seed=seed, samples=samples)
        self.files, self.seq_length = files, seq_length
        self._vocab_size = vocab_size
        self._ends = np.cumsum([file.tokens // seq_length for file in files], dtype=np.int64)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [seq_length].

        Labels are the sample's own tokens shifted by one, so that the last position has none: its mask is 0.
        """
        file, first = self.place(index)
        ids = file.read(first, self.seq_length)
        refuse_ids_read(ids, self._vocab_size, file.path, first)
        tokens = torch.from_numpy(ids.astype(np.int64))
        mask = torch.ones(self.seq_length)
        mask[-1] = 0.0
        labels = tokens.roll(-1)
        labels[-1] = 0  # any id within the vocabulary
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(self.seq_length)}

    def place(self, index: int) -> tuple[NpyFile, int]:
        """Return the file that a sample is from, and the number of its first token there."""
        sample = self.number(index)
        number = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return self.files[number], (sample - before) * self.seq_length


class ChatDataset(Epochs):
    """Samples of chats for fine-tuning: whole conversations packed to seq_length, each a document of its own.

    A sample has every token of its conversations as an input. A label is the next token of the same conversation, so
    that the last one predicts nothing; the files' mask of that very token says whether it is learned, whatever its id.
    Sample n depends on the files, their order, seq_length and the seed alone.
    """

    def __init__(
        self, conversations: Conversations, *, seq_length: int, seed: int, vocab_size: int, samples: int | None = None
    ) -> None:
        """See Epochs; ids are below `vocab_size`, or CorruptError is raised where one is read."""
        self.conversations, self.seq_length = conversations, seq_length
        self._vocab_size = vocab_size
        self._packing = pack(conversations.lengths, seq_length, seed=seed)
        super().__init__(len(self._packing), seed=seed, samples=samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), `document_ids` (int32), [s].

        The rest behind the last conversation is a document of zeros, without a loss.
        """
        tokens, labels, positions = (np.zeros(self.seq_length, np.int64) for _ in range(3))
        mask, documents = np.zeros(self.seq_length, np.float32), np.zeros(self.seq_length, np.int32)
        begin, members = 0, self.members(index)
        for document, number in enumerate(members):
            chats, local = self.conversations.place(number)
            ids, learned = (part[: self.seq_length] for part in chats[local])
            refuse_ids_read(ids, self._vocab_size, chats.ids_path, int(chats.starts[local]))
            end = begin + len(ids)
            tokens[begin:end], positions[begin:end], documents[begin:end] = ids, np.arange(len(ids)), document
            labels[begin : end - 1], mask[begin : end - 1] = ids[1:], learned[1:]
            begin = end
        positions[begin:], documents[begin:] = np.arange(self.seq_length - begin), len(members)
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in {**arrays, DOCUMENT_IDS: documents}.items()}

    def members(self, index: int) -> Sequence[int]:
        """Return the numbers of a sample's conversations, in the order in which they stand in it."""
        return list(map(int, self._packing.of(self.number(index))))


# -- where a sample's tokens are in the token files


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
        places = map(dataset.conversations.place, dataset.members(index))
        return [
            Span(chats.prefix, int(chats.starts[number]), min(int(chats.lengths[number]), dataset.seq_length))
            for chats, number in places
        ]
    return _merged(sequence_spans(dataset, index))


def sequence_spans(dataset: Any, index: int) -> list[Span]:
    """Return `sample_spans` with the sequences of a pair one by one: neighbors need not be of one document."""
    dataset = unwrapped(dataset)
    if isinstance(dataset, MixDataset):
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
    return [span for span in _pair_spans(dataset, index) if span.length]


def _pair_spans(dataset: Any, index: int) -> Iterator[Span]:
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
        last = merged[-1] if merged else None
        if last is not None and (last.prefix, last.first_token + last.length) == (span.prefix, span.first_token):
            merged[-1] = Span(last.prefix, last.first_token, last.length + span.length)
        else:
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
    eod_mask_loss: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample's tensors, [seq_length], with `document_ids` (int32) under `reset_attention_mask`."""
        item: dict[str, Tensor] = {**self.samples[index]}
        is_end = item["tokens"] == self.eod_id
        begins = is_end.roll(1).long()
        sequence_starts = itertools.accumulate(span.length for span in sequence_spans(self.samples, index))
        begins[[0, *(start for start in sequence_starts if start < len(begins))]] = 1
        document_ids = begins.cumsum(0) - 1
        if self.reset_attention_mask:
            item[DOCUMENT_IDS] = document_ids.int()
        if self.eod_mask_loss:
            item["loss_mask"] = item["loss_mask"] * ~is_end
        return item
