"""Blends of token files, in Megatron's form: sources, all with a weight or all without.

A source is a .bin and .idx pair, named by its prefix, or .npy files, named by a file, a glob or a folder. `@FILE`
stands for the words of a file.
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

from megatron_fanformer.data.remote_files import listed, optional_contents
from megatron_fanformer.data.token_files import NPY_SUFFIX, bin_path, idx_path, npy_prefix
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.stores import is_url, password_problem

Bounds = tuple[float, float]
Word = str | int | float
"""An entry of a list of token files; a number is a weight."""

PART_NAMES = ("training", "validation", "test")
TRAIN, VALIDATION = 0, 1  # positions in PART_NAMES, and in megatron-core's lists
SPLIT_PATTERN = re.compile(r"\d*\.?\d+(,\d*\.?\d+){1,2}")
COMMENT = re.compile(r"(^|\s)#.*")
TEXT_ENCODING = "utf-8-sig"  # an editor of Windows begins a file with a byte order mark, which is of no word
PAIR_END = re.compile(r"\.(bin|idx)$")


@dataclass(frozen=True)
class Source:
    """A source of samples: the prefix of a .bin and .idx pair, or the paths of .npy files in their order."""

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return its name in tables and messages: its path, of several files the first and their number."""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def is_npy(self) -> bool:
        """Return whether it is .npy files."""
        return self.paths[0].endswith(NPY_SUFFIX)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of its files: their paths without .bin, .idx or .npy."""
        return [npy_prefix(path) if self.is_npy else path for path in self.paths]

    @property
    def files(self) -> list[Path]:
        """Return all files on this machine that it is read from."""
        here = [path for path in self.paths if not is_url(path)]
        return [file for path in here for file in ([Path(path)] if self.is_npy else [bin_path(path), idx_path(path)])]

    @property
    def urls(self) -> list[str]:
        """Return the URLs of all files on other stores that it is read from."""
        there = [path for path in self.paths if is_url(path)]
        return [url for path in there for url in ([path] if self.is_npy else [path + ".bin", path + ".idx"])]


def source_labels(sources: Sequence[Source]) -> list[str]:
    """Return a short name for each source: its path (of files, their folder) below that of all, or its whole name."""
    path_lists = [[path if is_url(path) else os.path.abspath(path) for path in source.paths] for source in sources]
    paths = [source_paths[0] if len(source_paths) == 1 else _common_folder(source_paths) for source_paths in path_lists]
    folder = _common_folder([os.path.dirname(path) for path in paths])
    labels = [npy_prefix(path.removeprefix(folder).lstrip("/")) for path in map(redacted, paths)]
    return labels if len(set(labels)) == len(labels) else [redacted(source.name) for source in sources]


def _common_folder(paths: Sequence[str]) -> str:
    """Return the longest beginning of paths and URLs, in whole parts."""
    parts = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, parts))


@dataclass(frozen=True)
class Blend:
    """Sources to draw samples from. Without weights, each counts by its size."""

    sources: list[Source]
    weights: list[float] | None


def parse_blend(items: Sequence[Word]) -> Blend:
    """Read "source source …" or "weight source weight source …", one list entry per word.

    With weights, each goes with one source. Without, all .npy files together are one source, in their order.

    Raises InputError where the list is empty or malformed, or a glob, folder or blend file has nothing to read.
    """
    words = blend_words(items)
    if not words:
        raise InputError("the list is empty; name at least one prefix of a .bin and .idx pair, or a .npy file")
    numbers = [as_weight(word) for word in words]
    if numbers[0] is None:
        stray = next((word for word, number in zip(words, numbers, strict=True) if number is not None), None)
        if stray is not None:
            raise InputError(f"{stray!r} is a weight where others are missing; give every prefix a weight, or none")
        return Blend(_npy_as_one([_source(word) for word in words]), None)
    text = " ".join(words)
    shown = repr(text if len(text) <= 200 else text[:200] + " …")  # a blend file may have thousands
    weights = [number for number in numbers[0::2] if number is not None]
    if 2 * len(weights) != len(words):
        raise InputError(f"{shown} does not alternate; write weight prefix weight prefix …")
    if not all(0 < weight < math.inf for weight in weights):
        raise InputError(f"a weight of {shown} is not a positive number; leave such a prefix out")
    return Blend([_source(name) for name in words[1::2]], weights)


def as_weight(word: str) -> float | None:
    """Return a word as a number; None for a path."""
    try:
        return float(word)
    except ValueError:
        return None


def blend_words(items: Sequence[Word]) -> list[str]:
    """Return the words of a list, with those of blend files in the place of `@FILE`."""
    return [word for item in items for word in _item_words(str(item))]


def _item_words(item: str) -> list[str]:
    """Return the item itself, or the words of the blend file that it names, whose paths are relative to its folder."""
    if not item.startswith("@"):
        return [item]
    file = item[1:] if is_url(item[1:]) else str(Path(item[1:]))
    folder = file.rpartition("/")[0] if is_url(file) else str(Path(file).parent)
    try:
        lines = [COMMENT.sub("", line) for line in _content(file).decode(TEXT_ENCODING).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(
            f"blend file {redacted(file)} cannot be read ({reason}); name a text file of prefixes"
        ) from None
    words = [word for line in lines for word in line.split()]
    if any(word.startswith("@") for word in words):
        raise InputError(f"blend file {file} names another by @; list both where the first is named")
    step = 1 if not words or as_weight(words[0]) is None else 2
    for position in range(step - 1, len(words), step):
        words[position] = _below(folder, words[position])
    return words


def _content(file: str) -> bytes:
    if not is_url(file):
        return Path(file).read_bytes()
    (content,) = optional_contents([file])
    if content is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return content


def _below(folder: str, path: str) -> str:
    """Return a path that a blend file in a folder, or at a URL, has; one that is whole as it is."""
    if is_url(path):
        return path
    return f"{folder}/{path}" if is_url(folder) and not path.startswith("/") else str(Path(folder) / path)


def _source(word: str) -> Source:
    """Return the source that a word names. At a URL, a folder's name ends in /, so that most need not be looked up."""
    if is_url(word):
        is_many = word.endswith("/") or (word.endswith(NPY_SUFFIX) and glob.has_magic(word))
        return Source(_some(word, listed(word, NPY_SUFFIX)) if is_many else (re.sub(PAIR_END, "", word),))
    if Path(word).is_dir() and not idx_path(word).exists():
        return Source(_some(word, sorted(str(path) for path in Path(word).iterdir() if path.name.endswith(NPY_SUFFIX))))
    if word.endswith(NPY_SUFFIX) and glob.has_magic(word) and not Path(word).exists():
        return Source(_some(word, sorted(glob.glob(word, recursive=True))))
    return Source((word if idx_path(word).exists() else re.sub(PAIR_END, "", word),))


def _some(word: str, files: list[str]) -> tuple[str, ...]:
    if not files:
        raise InputError(f"{word} holds no .npy file; name files of token ids, or the prefix of a .bin and .idx pair")
    return tuple(files)


def _npy_as_one(sources: Sequence[Source]) -> list[Source]:
    """Return all .npy files as one source, in the place of the first of them."""
    files = Source(tuple(path for source in sources if source.is_npy for path in source.paths))
    merged: list[Source] = []
    for source in sources:
        if not source.is_npy:
            merged.append(source)
        elif files not in merged:
            merged.append(files)
    return merged


def blend_problems(name: str, items: Sequence[Word]) -> list[str]:
    """List the problems of a blend; `name` is the setting that holds it. No file is opened except a blend file."""
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
    """List the problems of a split such as "99,1,0" (training, validation, test)."""
    parts = [float(part) for part in split.split(",")] if SPLIT_PATTERN.fullmatch(split) else []
    if not parts or parts[0] <= 0 or parts[1] <= 0:
        return [f"data.split: {split!r} cuts off no validation part; write it as '99,1,0', training first"]
    return []


def split_bounds(split: str) -> list[Bounds | None]:
    """Return the fractions of the documents between which each part lies; None for a part that a split leaves out.

    Bit for bit the result of megatron-core's parse_and_normalize_split and convert_split_vector_to_split_matrix, which
    cannot be called before torch is imported.
    """
    stated = [float(part) for part in split.split(",")]
    sizes = np.array(stated + [0.0] * (len(PART_NAMES) - len(stated)), dtype=np.float64)
    shares = (sizes / np.sum(sizes)).tolist()
    ends = [0.0, *itertools.accumulate(shares)]
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]
