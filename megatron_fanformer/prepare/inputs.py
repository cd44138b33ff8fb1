"""Input files of a preparation: files, folders, glob patterns, URLs and lists of these, expanded in a fixed order."""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fanformer.data.blends import TEXT_ENCODING
from megatron_fanformer.data.remote_files import RemoteFile, forget_files, list_files, look_up, read_small_files
from megatron_fanformer.durable_files import sha256_of, sha256_of_stream
from megatron_fanformer.errors import InputError
from megatron_fanformer.stores import READ_BYTES, driver_of, is_url, password_problem
from megatron_fanformer.terminal import plural, show

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LINE_SUFFIXES = tuple(kind + ending for kind in (".jsonl", ".json", ".ndjson") for ending in ("", *COMPRESSIONS))
TEXT_SUFFIXES = tuple(kind + ending for kind in (".txt", ".md") for ending in ("", *COMPRESSIONS))
PARQUET_SUFFIX = ".parquet"
CHAT_SUFFIXES = (*LINE_SUFFIXES, PARQUET_SUFFIX)
DOCUMENT_SUFFIXES = (*CHAT_SUFFIXES, *TEXT_SUFFIXES)
# A search of a folder passes these over: they may be manifests and ledgers of a preparation.
NOT_SEARCHED_FOR = (".json", ".ledger.parquet")


@dataclass(frozen=True)
class RemoteInput(RemoteFile):
    """A file on another store, with the methods of `Path` that preparations use."""

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the end of the name, such as .gz."""
        return Path(self.name).suffix

    def stat(self) -> SimpleNamespace:
        """Return the size, and in place of the modification time a hash of the file's version, so that changes show."""
        version_hash = int(hashlib.sha256(str(self.version).encode()).hexdigest()[:15], 16)
        return SimpleNamespace(st_size=self.size, st_mtime_ns=version_hash)

    def open(self) -> Any:
        """Open the file for reading. Raises the errors of the store's driver."""
        files, path = driver_of(self.url)
        return files.open(path, "rb", block_size=READ_BYTES)


InputFile = Path | RemoteInput


def recorded_path(file: InputFile) -> str:
    """Return the path of an input file for manifests and ledgers: the URL, or the absolute path.

    Links are not resolved, since they may lead elsewhere on other machines. They are only in a path with `..`:
    after a link, `..` is the parent of the folder that the link leads to.
    """
    if isinstance(file, RemoteInput):
        return str(file)
    folder = file.parent.resolve() if ".." in file.parent.parts else file.parent.absolute()
    return str(folder / file.name)


def input_sha256(file: InputFile) -> str:
    """Return the hexadecimal SHA-256 of an input file."""
    if isinstance(file, Path):
        return sha256_of(file)
    with file.open() as stream:
        return sha256_of_stream(stream)


def expand_inputs(inputs: Iterable[str | Path], suffixes: tuple[str, ...] = DOCUMENT_SUFFIXES) -> list[InputFile]:
    """Return the files that `inputs` name, each file once: local files sorted by path, then those at URLs.

    An input is the path or the URL of a file, of a folder (a URL ends in /) or of files that match a glob pattern, or
    `@FILE`, a list of inputs, one per line. A folder's plain `.json` files are not taken.

    Raises:
        InputError: there is no input, an input does not exist, cannot be read or is of another kind, a folder or a
            pattern has no document file, or a link leads to no file.
        FanformerError: a store does not answer.
    """
    forget_files()
    local: list[Path] = []
    remote: dict[str, RemoteInput] = {}
    for name in _expand_lists(inputs):
        if is_url(name):
            remote |= {file.url: file for file in _expand_url(name, suffixes)}
        else:
            local += _expand_path(name, suffixes)
    by_target: dict[Path, Path] = {}  # of several links to one file, only the first is taken
    for file in sorted(local, key=lambda file: Path(recorded_path(file))):
        if not file.is_file():
            kind = "a link to no file" if file.is_symlink() else "no file"
            raise InputError(f"{file} is {kind}, its documents would be missing; put the file there, or remove it")
        by_target.setdefault(file.resolve(), file)
    if not (by_target or remote):
        raise InputError("no input; name at least one document file or a folder of them")
    return [*by_target.values(), *(remote[url] for url in sorted(remote))]


def _expand_lists(inputs: Iterable[str | Path]) -> Iterator[str]:
    """Yield the inputs; in place of `@FILE`, yield the lines of that file that are neither empty nor begin with #."""
    for name in map(str, inputs):
        if not name.startswith("@"):
            yield name
            continue
        path = name[1:]
        try:
            content = read_small_files([path])[0] if is_url(path) else Path(path).read_bytes()
            lines = (content or b"").decode(TEXT_ENCODING).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the list {path} cannot be read ({error}); name a file with one path per line") from error
        yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _expand_url(url: str, suffixes: tuple[str, ...]) -> list[RemoteInput]:
    if problem := password_problem("an input", url):
        raise InputError(problem)
    if url.endswith("/"):
        urls = [file_url for file_url in list_files(f"{url}**", suffixes) if not file_url.endswith(NOT_SEARCHED_FOR)]
    elif glob.has_magic(url) and look_up([url])[0] is None:  # a pattern, not the name of a file
        urls = list_files(url, suffixes)
    else:
        urls = [url] if url.endswith(suffixes) else []
    files = [RemoteInput(*astuple(file)) for file in look_up(urls) if file is not None]
    if not files:
        raise InputError(
            f"{url} names no document file; name one that exists, with one of {', '.join(suffixes)}, or a folder of"
            " them with / at its end"
        )
    return files


def _expand_path(name: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(name)
    if not path.exists() and glob.has_magic(name):
        matches = [Path(match) for match in glob.glob(name, recursive=True) if match.endswith(suffixes)]
        if not matches:
            raise InputError(f"{name} matches no document file; it must match {', '.join(suffixes)} files")
        return matches
    if path.is_dir():
        return _search_folder(path, suffixes)
    if not path.exists():
        raise InputError(f"{path} does not exist; name an existing document file or folder")
    if suffixes == CHAT_SUFFIXES and path.name.endswith(TEXT_SUFFIXES):
        raise InputError(f"{path} is plain text, which holds no conversation; leave it out, or prepare without --chat")
    if not path.name.endswith(suffixes):
        raise InputError(f"{path} is not a document file; its name must end in one of {', '.join(suffixes)}")
    return [path]


def _search_folder(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the document files in a folder and below, and show how many other files there are."""
    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=_raise_unreadable) for name in names]
    files = [path for path in paths if path.name.endswith(suffixes) and not path.name.endswith(NOT_SEARCHED_FOR)]
    if not files:
        raise InputError(f"{folder} holds no document file; a folder must hold {', '.join(suffixes)} files")
    if others := set(paths).difference(files):
        show([f"{folder}: {plural(len(others), 'file')} of other kinds passed over, such as {min(others)}"])
    return files


def _raise_unreadable(error: OSError) -> None:
    """Raise InputError for a folder that `os.walk` cannot read, and would skip silently."""
    raise InputError(
        f"{error.filename} cannot be searched ({error.strerror}), its files would be missing; make it readable"
    ) from error
