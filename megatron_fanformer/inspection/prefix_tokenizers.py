"""The tokenizers that a run's tokens are shown with: the configuration's, else the one that each manifest names."""

from functools import cache
from pathlib import Path

from megatron_fanformer.data.identity import another_tokenizer
from megatron_fanformer.data.manifest import TokenizerRecord, read_any_manifest
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import sha256_of


class PrefixTokenizers:
    """The tokenizer of each prefix of token files.

    Args:
        path: `data.tokenizer`, which all are shown with; None: each with the one that its manifest names.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found: dict[str, Tokenizer | None] = {}
        self._load = cache(lambda path: load_tokenizer(path, needs_eod=False))  # nothing is encoded
        self._sha256_of = cache(sha256_of)
        self.notes: list[str] = []
        """A line for each prefix so far that was made with another tokenizer than there is."""

    def of(self, prefix: str) -> Tokenizer | None:
        """Return the tokenizer of a prefix; None where none is known.

        Raises:
            InputError: it cannot be read.
        """
        if prefix not in self._found:
            manifest = read_any_manifest(prefix)
            self._found[prefix] = self._tokenizer(prefix, manifest.tokenizer if manifest else None)
        return self._found[prefix]

    def _tokenizer(self, prefix: str, stated: TokenizerRecord | None) -> Tokenizer | None:
        if self._path is not None:
            tokenizer = self._load(self._path)
            sha256 = self._sha256_of(tokenizer.path)
            if stated and (other := another_tokenizer([stated.sha256], sha256, "data.tokenizer")):
                self.notes.append(
                    f"{prefix} was made with {other}; unless both give the same ids, this is not its text"
                )
            return tokenizer
        if stated is None or not (file := Path(stated.path)).is_file():
            return None
        if self._sha256_of(file) == stated.sha256:
            return self._load(stated.path)
        self.notes.append(
            f"{prefix} was made with another tokenizer than {file} is now; set data.tokenizer to that one"
        )
        return None
