"""Samples of chats for fine-tuning: whole conversations packed to seq_length, each a document of its own.

A sample has every token of its conversations as an input. A label is the next token of the same conversation, so that
the last one predicts nothing; whether it is learned is what the files say about that very token, whatever its id: an
end of text that is learned counts, also where padding has the same id. The conversations of a set are packed once;
each epoch takes all samples once, in an order of its own.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.batches import DOCUMENT_IDS
from megatron_fanformer.data.npy_dataset import Epochs
from megatron_fanformer.data.packing import Conversations, pack
from megatron_fanformer.data.token_files import refuse_ids_read


class ChatDataset(Epochs):
    """Samples of packed conversations.

    Sample n depends on the files, their order, seq_length and the seed alone. Some 35 bytes a conversation are held in
    memory, which forked loader processes share.
    """

    def __init__(
        self,
        conversations: Conversations,
        *,
        seq_length: int,
        seed: int,
        vocab_size: int,
        samples: int | None = None,
    ) -> None:
        """See Epochs; ids are below `vocab_size`."""
        self.conversations, self.seq_length = conversations, seq_length
        self._vocab_size = vocab_size
        self._packing = pack(conversations.lengths, seq_length, seed=seed)
        super().__init__(len(self._packing), seed=seed, samples=samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), `document_ids` (int32), [s].

        The rest behind the last conversation is a document of zeros, without a loss.

        Raises:
            CorruptError: a file holds an id outside the vocabulary.
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
        members: list[int] = self._packing.of(self.number(index)).tolist()
        return members
