"""The section `evaluation.perplexity` of a run's configuration: which sets, and how their tokens are scored."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_fanformer.data.npy_files import NpyType

Group = Literal["v2-small", "v3-small"]
Chunking = Literal["tokens", "documents"]


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """Sets of tokens whose perplexity is measured."""

    sets: dict[str, list[str]] = field(default_factory=dict)
    """Sets by name: prefixes of pairs, `.npy` files, globs, or folders."""
    groups: list[Group] = field(default_factory=list)
    """The paper's groups of sets, in `folder`."""
    folder: str | None = None
    """Where the sets of `groups` are, as OLMo lays them out (docs/evaluation.md#perplexity-sets)."""
    chunking: Chunking = "tokens"
    """`tokens`: each file cut into chunks, across documents, as in the paper; `documents`: each by itself."""
    chunk_tokens: int | None = None
    """Tokens of a chunk, all but the first scored; null: `seq_length`."""
    batches: int | None = None
    """Batches of `evaluation.batch_tokens` from the beginning of each set; null: whole sets."""
    npy_dtype: NpyType = "uint16"
    """Type of the token ids in `.npy` files without a manifest."""
    eod_id: int | None = None
    """With `documents`: the id that ends one in `.npy` files; null: the manifest's or the tokenizer's."""

    @property
    def is_empty(self) -> bool:
        """Return whether it names no set."""
        return not (self.sets or self.groups)

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each; no file is looked for."""
        section = "evaluation.perplexity"
        found = [
            f"{section}.sets: {name!r} is no name of a set; use letters, digits, '.', '_' and '-'"
            for name in self.sets
            if not name or not all(c.isalnum() or c in "._-" for c in name)
        ]
        found += [f"{section}.sets.{name} is empty; name token files" for name, paths in self.sets.items() if not paths]
        if self.groups and self.folder is None:
            found.append(f"{section}.groups is {', '.join(self.groups)} without a folder; set {section}.folder")
        if self.chunk_tokens is not None and self.chunk_tokens < 2:
            found.append(f"{section}.chunk_tokens is {self.chunk_tokens}; it must be at least 2, or null")
        if self.batches is not None and self.batches < 1:
            found.append(f"{section}.batches is {self.batches}; it must be at least 1, or null")
        if self.eod_id is not None and self.eod_id < 0:
            found.append(f"{section}.eod_id is {self.eod_id}; it must not be negative")
        return found
