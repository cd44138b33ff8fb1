"""A model that writes given texts: what judges texts is tested with what it must find."""

from types import SimpleNamespace

import torch

from megatron_fanformer.data.tokenizer import Tokenizer


class Oracle:
    """Stands in for a `TrainedModel`: behind each prompt it writes the prompt's texts, one a row, then ends."""

    def __init__(self, tokenizer: Tokenizer, texts: dict[str, list[str]], seq_length: int = 100_000) -> None:
        self.config = SimpleNamespace(seq_length=seq_length)
        self._vocab_size, self._seq_length = tokenizer.vocab_size, seq_length
        self._texts = {
            tuple(tokenizer.encode(prompt)): iter([[*tokenizer.encode(text), tokenizer.eod_id] for text in texts])
            for prompt, texts in texts.items()
        }
        self._rows: list[list[int]] = []
        self._following: list[list[int]] = []

    def decoder(self, batch_size: int, max_length: int) -> "Oracle":
        assert max_length <= self._seq_length
        self._rows, self._following = [[] for _ in range(batch_size)], [[] for _ in range(batch_size)]
        return self

    def keep_rows(self, rows: list[int]) -> None:
        self._rows, self._following = ([kept[row] for row in rows] for kept in (self._rows, self._following))

    def next_logits(self, ids_bs: torch.Tensor) -> torch.Tensor:
        following = []
        for number, ids in enumerate(ids_bs.tolist()):
            self._rows[number] += ids
            if (found := self._texts.get(tuple(self._rows[number]))) is not None:
                self._following[number] = next(found)
            following.append(self._following[number].pop(0) if self._following[number] else 0)
        return 100 * torch.nn.functional.one_hot(torch.tensor(following), self._vocab_size).float()
