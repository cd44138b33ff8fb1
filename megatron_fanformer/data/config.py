"""The section `data` of a run's configuration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_fanformer.data.blends import Blend, Source, Word, blend_problems, parse_blend, split_problems
from megatron_fanformer.data.chats import chat_problems, parse_chats
from megatron_fanformer.data.mixes import mix_problems, overlap_problems
from megatron_fanformer.data.token_files import NpyType
from megatron_fanformer.errors import InputError, collect_problems

SPLIT_VALIDATION = "validation"  # the name of the validation set that a split cuts off
TRAINING, TOKENIZER = "train", "tokenizer"  # names in `allow_change`, beside those of validation sets


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from."""

    format: Literal["pretraining", "sft"] = "pretraining"
    """`pretraining`: samples are cut out of the running text; `sft`: whole conversations are packed
    (docs/fine-tuning.md#training)."""
    train_data: list[Word] = field(default_factory=list)
    """Token files, globs, folders, `@FILE`, or weight file weight file … (docs/data.md#what-a-run-reads); not empty."""
    stages: dict[str, list[Word]] = field(default_factory=dict)
    """Other mixes later in the run, by where they begin, such as `from step 9001` or `from token 3.9T`, each like
    `train_data` (docs/data.md#stages)."""
    valid_data: dict[str, list[Word]] = field(default_factory=dict)
    """Validation sets by name, each like `train_data`."""
    split: str | None = None
    """Without `valid_data`: training, validation and test shares of `train_data` by documents, e.g. `"99,1,0"`; not
    with `.npy` files."""
    npy_dtype: NpyType = "uint16"
    """Type of the token ids in `.npy` files without a manifest."""
    tokenizer: str | None = None
    """A `.model` or a `tokenizer.json`, or a folder with one; copied into every checkpoint."""
    reset_attention_mask: bool = False
    """Attention stays within documents (docs/fine-tuning.md#attention-within-documents), not across them as in the
    paper."""
    eod_mask_loss: bool = False
    """No loss where an end of text is read."""
    cache_path: str | None = None
    """Folder for sample indices, shared by all nodes; null: `.index_cache` beside `train_data`."""
    num_workers: int | None = None
    """Loader processes of each rank that reads; 0: its own; null: 2 on a GPU, whose step need not wait, else 0."""
    allow_change: list[str] = field(default_factory=list)
    """Changes of the data to allow for one start: `train`, `tokenizer`, or names of `valid_data`
    (docs/data.md#the-same-data-on-resuming)."""

    def problems(self) -> list[str]:
        """Return the problems of this section, one line each, without opening a token file."""
        list_problems = chat_problems if self.is_chats else blend_problems
        problems = list_problems("data.train_data", self.train_data)
        for name, items in self.valid_data.items():
            problems += list_problems(f"data.valid_data.{name}", items)
        if self.stages:
            problems += self._stage_problems(has_readable_blends=not problems)
        if self.is_chats and not self.reset_attention_mask:
            problems.append("data.reset_attention_mask: false, but packed conversations are kept apart; leave it out")
        if self.is_chats and self.eod_mask_loss:
            problems.append("data.eod_mask_loss: true, but chats state themselves what is learned; leave it out")
        if self.split is not None:
            if self.valid_data:
                problems.append("data.split: cannot be combined with data.valid_data; remove one of the two")
            elif not problems and any(source.is_npy for source in self.sources()):
                problems.append(
                    "data.split: cuts by documents, and .npy files do not mark them; name files as data.valid_data"
                )
            problems += split_problems(self.split)
        if not problems:
            collect_problems(problems, self.index_cache)  # called only for the problem that it may raise
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            problems.append(f"data.tokenizer: {self.tokenizer} does not exist; name a .model or tokenizer.json")
        if self.num_workers is not None and self.num_workers < 0:
            problems.append(f"data.num_workers: {self.num_workers} is negative; 0 loads in the rank's own process")
        names = (TRAINING, TOKENIZER, *self.valid_data)
        problems += [
            f"data.allow_change: {name} is no set of data; name one of {', '.join(names)}"
            for name in self.allow_change
            if name not in names
        ]
        return problems

    def _stage_problems(self, *, has_readable_blends: bool) -> list[str]:
        """List the problems of `stages`; if the blends can be read, also a file that is in two sources."""
        if self.is_chats:
            return ["data.stages: chats have none: an epoch takes every conversation once; leave it out"]
        if self.split is not None:
            return ["data.stages: cannot be combined with data.split; name validation files as data.valid_data"]
        problems = mix_problems(self.stages)
        if not problems and has_readable_blends:
            problems = overlap_problems([self.train_data, *self.stages.values()])
        return problems

    @property
    def is_chats(self) -> bool:
        """Return whether samples are packed conversations."""
        return self.format == "sft"

    @property
    def validation_sets(self) -> list[str]:
        """Return the names of the validation sets, including the one that a split cuts off."""
        return list(self.valid_data) if self.split is None else [SPLIT_VALIDATION]

    @property
    def marks_documents(self) -> bool:
        """Return whether a setting needs the ends of documents to be found; in chats the ends are known."""
        return not self.is_chats and (self.reset_attention_mask or self.eod_mask_loss)

    def sources(self) -> Iterator[Source]:
        """Yield every source, first those of training. Raises InputError if a blend cannot be read."""
        for items in (self.train_data, *self.stages.values(), *self.valid_data.values()):
            yield from self.blend(items).sources

    def blend(self, items: Sequence[Word]) -> Blend:
        """Parse a list of sources as a list of chats or of token files. Raises InputError if it cannot be read."""
        return parse_chats(items) if self.is_chats else parse_blend(items)

    def index_cache(self) -> Path:
        """Return the folder for sample indices. Raises InputError if the folder is unknown, or if a blend is wrong."""
        if self.cache_path:
            return Path(self.cache_path)
        first_source = next(self.sources())
        if not first_source.files:
            raise InputError(
                "data.cache_path is null, and there is no folder beside token files on another store; name a folder of"
                " this machine that all nodes see"
            )
        return first_source.files[0].absolute().parent / ".index_cache"
