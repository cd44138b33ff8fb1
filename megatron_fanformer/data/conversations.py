"""The conversations of a set of chats: which files each is from, and how long it is. torch is not imported."""

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, Blend, parse_chats, split_bounds
from megatron_fanformer.data.chat_files import ChatFiles, open_chats
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.sample_counts import TRAIN, VALIDATION
from megatron_fanformer.errors import InputError


class Conversations:
    """The conversations of a set of chats, numbered source after source; of a part of each where they are split.

    Raises:
        InputError: no such files, or a part without conversations.
        CorruptError: files that disagree with one another.
    """

    def __init__(self, blend: Blend, *, split: str | None = None, part: int = TRAIN) -> None:
        bounds = (0.0, 1.0) if split is None else split_bounds(split)[part]
        assert bounds is not None, "a split without the part is refused before"
        prefixes = [source.paths[0] for source in blend.sources]
        opened = {prefix: open_chats(prefix) for prefix in prefixes}
        self._sources: list[ChatFiles] = [opened[prefix] for prefix in prefixes]
        ranges = [[round(bound * len(chats)) for bound in bounds] for chats in self._sources]
        self._begins = [begin for begin, _ in ranges]
        self._ends = np.cumsum([end - begin for begin, end in ranges])
        own = [chats.lengths[begin:end] for chats, (begin, end) in zip(self._sources, ranges, strict=True)]
        self.lengths: np.ndarray = np.concatenate(own)
        """[n] int64, tokens of each."""
        if not self.lengths.any():
            of_part = "" if split is None else f" left for {PART_NAMES[part]} by data.split {split}"
            raise InputError(f"{', '.join(prefixes)}: no conversation is{of_part or ' there'}; name more chats")

    def place(self, number: int) -> tuple[ChatFiles, int]:
        """The files of a conversation, and its number there."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[source - 1]) if source else 0
        return self._sources[source], self._begins[source] + int(number) - before


def training_conversations(config: DataConfig) -> Conversations:
    """What a run is trained on; raises as `Conversations`."""
    return Conversations(parse_chats(config.train_data), split=config.applied_split)


def validation_conversations(config: DataConfig) -> dict[str, Conversations]:
    """The validation sets by name; raises as `Conversations`."""
    if config.applied_split is not None:
        blend = parse_chats(config.train_data)
        return {SPLIT_VALIDATION: Conversations(blend, split=config.applied_split, part=VALIDATION)}
    return {name: Conversations(parse_chats(items)) for name, items in config.valid_data.items()}
