"""Blends of token files, in Megatron's form: sources, all with a weight or all without.

A source is a .bin and .idx pair, named by its prefix, or a set of .npy files, named by a file, a glob or a folder.
`@FILE` stands for the entries that a blend file lists.
"""

import errno
import glob
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fanformer.data.remote_files import list_files, read_small_files
from megatron_fanformer.data.token_files import NPY_SUFFIX, idx_path, npy_prefix
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.stores import is_url, password_problem

Word = str | int | float
"""An entry of a list of token files; a number is a weight."""

PART_NAMES = ("training", "validation", "test")
TRAIN, VALIDATION = 0, 1  # positions in PART_NAMES, and in megatron-core's lists
SPLIT_PATTERN = re.compile(r"\d*\.?\d+(,\d*\.?\d+){1,2}")
COMMENT = re.compile(r"(^|\s)#.*")
TEXT_ENCODING = "utf-8-sig"  # without the byte order mark that editors on Windows put first
PAIR_SUFFIX = re.compile(r"\.(bin|idx)$")


@dataclass(frozen=True)
class Source:
    """A source of samples: the prefix of a .bin and .idx pair, or the paths of .npy files in their order."""

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name in tables and messages: the path, or the first of several paths and the number of others."""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def is_npy(self) -> bool:
        """Return whether the source consists of .npy files."""
        return self.paths[0].endswith(NPY_SUFFIX)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefix of the pair, or the path of each .npy file without .npy."""
        return [npy_prefix(path) if self.is_npy else path for path in self.paths]

    @property
    def files(self) -> list[Path]:
        """Return the files of this source that are on this machine."""
        return [Path(name) for name in self._file_names if not is_url(name)]

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the files of this source that are on other stores."""
        return [name for name in self._file_names if is_url(name)]

    @property
    def _file_names(self) -> list[str]:
        return [path + suffix for path in self.paths for suffix in ([""] if self.is_npy else [".bin", ".idx"])]


def source_labels(sources: Sequence[Source]) -> list[str]:
    """Return a label for each source: its path below the folder common to all, or its name if two labels were equal."""
    full_paths = [[path if is_url(path) else os.path.abspath(path) for path in source.paths] for source in sources]
    paths = [files[0] if len(files) == 1 else _common_folder(files) for files in full_paths]  # one of each source
    folder = _common_folder([os.path.dirname(path) for path in paths])
    labels = [npy_prefix(path.removeprefix(folder).lstrip("/")) for path in map(redacted, paths)]
    return labels if len(set(labels)) == len(labels) else [redacted(source.name) for source in sources]


def _common_folder(paths: Sequence[str]) -> str:
    """Return the longest common beginning of paths or URLs that ends at a slash, without the slash."""
    levels = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


@dataclass(frozen=True)
class Blend:
    """Sources to draw samples from; without weights (None), in proportion to the sizes of the sources."""

    sources: list[Source]
    weights: list[float] | None


def parse_blend(items: Sequence[Word]) -> Blend:
    """Parse "source source …" or "weight source weight source …", one word per list entry.

    In a list without weights, all .npy files together make one source, in the order of the list.

    Raises InputError if the list is empty or malformed, if a glob or a folder matches no .npy file, or if a blend file
    cannot be read.
    """
    words = list_words(items)
    if not words:
        raise InputError("the list is empty; name at least one prefix of a .bin and .idx pair, or a .npy file")
    numbers = [as_weight(word) for word in words]
    if numbers[0] is None:  # a list without weights
        if stray := [word for word, number in zip(words, numbers, strict=True) if number is not None]:
            raise InputError(f"{stray[0]!r} is a weight where others are missing; give every prefix a weight, or none")
        return Blend(_merge_npy_sources([_source(word) for word in words]), None)
    text = " ".join(words)
    shown = repr(text if len(text) <= 200 else text[:200] + " …")  # a blend file may have thousands
    weights = [number for number in numbers[0::2] if number is not None]
    if 2 * len(weights) != len(words):  # a path in the place of a weight, or an odd number of words
        raise InputError(f"{shown} does not alternate; write weight prefix weight prefix …")
    if not all(0 < weight < math.inf for weight in weights):
        raise InputError(f"a weight of {shown} is not a positive number; leave such a prefix out")
    return Blend([_source(name) for name in words[1::2]], weights)


def as_weight(word: str) -> float | None:
    """Return the weight that a word states; None if the word is a path."""
    try:
        return float(word)
    except ValueError:
        return None


def list_words(items: Sequence[Word]) -> list[str]:
    """Return the words of a list, with the words of the blend file in place of each `@FILE`."""
    return [word for item in items for word in _expand_item(str(item))]


def _expand_item(item: str) -> list[str]:
    """Return the words of the blend file that `@FILE` names, with full paths; return any other item unchanged.

    Raises InputError if the blend file cannot be read, or names another blend file.
    """
    if not item.startswith("@"):
        return [item]
    file = item[1:] if is_url(item[1:]) else str(Path(item[1:]))
    folder = file.rpartition("/")[0] if is_url(file) else str(Path(file).parent)
    try:
        content = read_small_files([file])[0] if is_url(file) else Path(file).read_bytes()
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        lines = [COMMENT.sub("", line) for line in content.decode(TEXT_ENCODING).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"blend file {redacted(file)} cannot be read ({reason}); name a file of prefixes") from None
    words = [word for line in lines for word in line.split()]
    if any(word.startswith("@") for word in words):
        raise InputError(f"blend file {file} names another by @; list both where the first is named")
    has_weights = bool(words) and as_weight(words[0]) is not None
    first_path, step = (1, 2) if has_weights else (0, 1)
    for position in range(first_path, len(words), step):
        words[position] = _resolve(folder, words[position])
    return words


def _resolve(folder: str, path: str) -> str:
    """Resolve a path against `folder`, which may be a URL; return a URL or an absolute path unchanged."""
    if is_url(path):
        return path
    if is_url(folder) and not path.startswith("/"):
        return f"{folder}/{path}"
    return str(Path(folder) / path)


def _source(word: str) -> Source:
    """Return the source that a word names. A URL means a folder only if it ends in /: the store is not asked."""
    is_pattern = word.endswith(NPY_SUFFIX) and glob.has_magic(word)
    if is_url(word):
        is_many = word.endswith("/") or is_pattern
        return _npy_source(word, list_files(word, NPY_SUFFIX)) if is_many else Source((re.sub(PAIR_SUFFIX, "", word),))
    if Path(word).is_dir() and not idx_path(word).exists():
        files = sorted(str(path) for path in Path(word).iterdir() if path.name.endswith(NPY_SUFFIX))
        return _npy_source(word, files)
    if is_pattern and not Path(word).exists():
        return _npy_source(word, sorted(glob.glob(word, recursive=True)))
    # A pair may be named by its .bin or .idx file. A prefix may itself end in .bin: then PREFIX.idx exists.
    return Source((word if idx_path(word).exists() else re.sub(PAIR_SUFFIX, "", word),))


def _npy_source(word: str, files: list[str]) -> Source:
    if not files:
        raise InputError(f"{word} holds no .npy file; name files of token ids, or the prefix of a .bin and .idx pair")
    return Source(tuple(files))


def _merge_npy_sources(sources: Sequence[Source]) -> list[Source]:
    """Join all sources of .npy files to one source, in the place of the first of them."""
    all_files = Source(tuple(path for source in sources if source.is_npy for path in source.paths))
    merged: list[Source] = []
    for source in sources:
        if not source.is_npy:
            merged.append(source)
        elif all_files not in merged:
            merged.append(all_files)
    return merged


def blend_problems(name: str, items: Sequence[Word]) -> list[str]:
    """List the problems of a blend, which the setting `name` holds, without opening files other than blend files."""
    try:
        blend = parse_blend(items)
    except InputError as error:
        return [f"{name}: {error}"]
    paths = [path for source in blend.sources for path in source.paths]
    if chains := [path for path in paths if "::" in path and "://" in path]:
        return [f"{name}: {redacted(chain)} is a chain of URLs; name the store's own" for chain in chains]
    problems = [problem for path in paths if is_url(path) and (problem := password_problem(name, path))]
    return problems + [
        f"{name}: {path} does not exist; name .npy files, or the prefix of a .bin and .idx pair, as prepare writes it"
        for source in blend.sources
        for path in source.files
        if not path.is_file()
    ]


def split_problems(split: str) -> list[str]:
    """List the problems of `data.split`: shares of training, validation and test, such as "99,1,0"."""
    shares = [float(share) for share in split.split(",")] if SPLIT_PATTERN.fullmatch(split) else []
    if not shares or shares[TRAIN] <= 0 or shares[VALIDATION] <= 0:
        return [f"data.split: {split!r} cuts off no validation part; write it as '99,1,0', training first"]
    return []


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """Return, for each part, the fractions of the documents at which it begins and ends; None for an empty part.

    The result equals, bit for bit, that of megatron-core's parse_and_normalize_split and
    convert_split_vector_to_split_matrix, which cannot be called before torch is imported.
    """
    stated = [float(part) for part in split.split(",")]
    sizes = np.array(stated + [0.0] * (len(PART_NAMES) - len(stated)), dtype=np.float64)
    shares = (sizes / np.sum(sizes)).tolist()
    ends = [0.0, *itertools.accumulate(shares)]
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]
