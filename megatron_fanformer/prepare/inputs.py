"""Input files of a preparation: files, folders, glob patterns and lists of them, in one fixed order."""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fanformer.data.blends import TEXT_ENCODING
from megatron_fanformer.durable_files import sha256_of, sha256_of_pieces
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.stores import READ_BYTES, driver_of, is_url, password_problem, pieces, query
from megatron_fanformer.terminal import plural, show

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LINE_KINDS, TEXT_KINDS = (".jsonl", ".json", ".ndjson"), (".txt", ".md")
LINE_SUFFIXES, TEXT_SUFFIXES = (
    tuple(kind + compression for kind in kinds for compression in ("", *COMPRESSIONS))
    for kinds in (LINE_KINDS, TEXT_KINDS)
)
PARQUET_SUFFIX = ".parquet"
CHAT_SUFFIXES = (*LINE_SUFFIXES, PARQUET_SUFFIX)
DOCUMENT_SUFFIXES = (*CHAT_SUFFIXES, *TEXT_SUFFIXES)
LOOKUPS_AT_ONCE = 16
# In a folder these are manifests and ledgers of a preparation, not documents.
NOT_SEARCHED_FOR = (".json", ".ledger.parquet")


@dataclass(frozen=True)
class RemoteInput:
    """A file on another store, with the part of a Path's interface that preparations use."""

    url: str
    size: int
    version: int
    """A hash of what the store states of the file."""

    def __str__(self) -> str:
        return redacted(self.url)

    @property
    def name(self) -> str:
        """Return the last part of its URL."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the end of its name, such as .gz."""
        return Path(self.name).suffix

    def stat(self) -> SimpleNamespace:
        """Return its size, and its version in the place of the time of its last change."""
        return SimpleNamespace(st_size=self.size, st_mtime_ns=self.version)

    def open(self) -> Any:
        """Open it for reading. Raises the driver's errors."""
        import fsspec

        return fsspec.open(self.url, "rb", block_size=READ_BYTES).open()


InputFile = Path | RemoteInput


def recorded_path(file: InputFile) -> str:
    """Return the path of an input in manifests and ledgers: its URL, or its absolute path, however it was named.

    Links are kept, as they may lead elsewhere on other machines, unless `..` follows one.
    """
    if isinstance(file, RemoteInput):
        return str(file)
    folder = file.parent.resolve() if ".." in file.parent.parts else file.parent.absolute()
    return str(folder / file.name)


def input_sha256(file: InputFile) -> str:
    """Return the hexadecimal SHA-256 of an input."""
    if isinstance(file, Path):
        return sha256_of(file)
    with file.open() as stream:
        return sha256_of_pieces(pieces(stream))


def find_remote(urls: Sequence[str]) -> list[list[RemoteInput]]:
    """Return the files that each URL names: a file, a folder with / at its end, or a glob pattern.

    Raises:
        InputError: there is no driver for a store, no right to use it, or no size stated.
        FanformerError: a store does not answer.
    """
    from fsspec.utils import tokenize

    stores = {url: "/".join(url.split("/", 3)[:3]) for url in urls}
    drivers = {store: driver_of(url)[0] for url, store in stores.items()}

    def list_files(url: str) -> list[RemoteInput]:
        files = drivers[stores[url]]
        path = files._strip_protocol(url)
        if url.endswith("/"):
            infos = files.find(path, detail=True)
        else:
            try:
                infos = {path: files.info(path)}
            except FileNotFoundError:
                infos = files.glob(path, detail=True) if glob.has_magic(url) else {}
        chosen = {files.unstrip_protocol(name): info for name, info in infos.items() if info["type"] == "file"}
        if sizeless := next((url for url, info in chosen.items() if info["size"] is None), None):
            raise InputError(f"{redacted(sizeless)}: its store states no size; serve it by one that does")
        return [RemoteInput(url, info["size"], int(tokenize(info), 16) % (1 << 63)) for url, info in chosen.items()]

    with ThreadPoolExecutor(LOOKUPS_AT_ONCE) as pool:
        return list(pool.map(lambda url: query(url, lambda: list_files(url)), urls))


def expand_inputs(inputs: Iterable[str | Path], suffixes: Sequence[str] = DOCUMENT_SUFFIXES) -> list[InputFile]:
    """Return the files that `inputs` name, sorted by path, however they were named; those at URLs come last.

    An input is a file, a folder (searched through), a glob pattern, or `@FILE`, a list of these, one per line
    (empty lines and those that begin with # are skipped); or its URL, of a folder with / at its end. Plain `.json`
    files are taken only if named.

    Raises:
        InputError: no input, a path that does not exist, a file of another kind, a folder or a pattern
            without files, a link to no file, a folder that cannot be read, or a file named twice (several links to
            one file count once).
        FanformerError: a store does not answer.
    """
    names, kinds = list(_with_lists(inputs)), tuple(suffixes)
    files = _local_inputs([name for name in names if not is_url(name)], kinds)
    remote = _remote_inputs([name for name in names if is_url(name)], kinds)
    if not (files or remote):
        raise InputError("no input; name at least one document file or a folder of them")
    return [*files, *remote]


def _remote_inputs(urls: Sequence[str], suffixes: tuple[str, ...]) -> list[RemoteInput]:
    """Return the files that URLs name, sorted."""
    if problem := next((problem for url in urls if (problem := password_problem("an input", url))), None):
        raise InputError(problem)
    chosen: list[RemoteInput] = []
    for url, files in zip(urls, find_remote(urls), strict=True):
        matches = [file for file in files if file.name.endswith(suffixes)]
        if url.endswith("/"):
            matches = [file for file in matches if not file.name.endswith(NOT_SEARCHED_FOR)]
        if not matches:
            raise InputError(
                f"{url} names no document file; name one that exists, with one of {', '.join(suffixes)}, or a folder of"
                " them with / at its end"
            )
        chosen += matches
    chosen.sort(key=str)
    _refuse_twice(map(str, chosen))
    return chosen


def _refuse_twice(paths: Iterable[str]) -> None:
    """Raise InputError if a path follows itself."""
    if twice := next((path for path, following in itertools.pairwise(paths) if path == following), None):
        raise InputError(f"{twice} is named twice among the inputs, its documents would count double; name it once")


def _local_inputs(names: Iterable[str], suffixes: tuple[str, ...]) -> list[Path]:
    named = (file for name in names for file in _expand(name, suffixes))
    files = sorted(named, key=lambda file: Path(recorded_path(file)))
    _refuse_twice(map(recorded_path, files))
    chosen: dict[Path, Path] = {}
    for file in files:
        if not os.path.isfile(file):
            kind = "a link to no file" if file.is_symlink() else "no file"
            raise InputError(f"{file} is {kind}, its documents would be missing; put the file there, or remove it")
        chosen.setdefault(file.resolve(), file)
    if links := len(files) - len(chosen):
        show([f"{plural(links, 'link')} passed over, to files that are counted already"])
    return list(chosen.values())


def _with_lists(inputs: Iterable[str | Path]) -> Iterator[str]:
    for name in map(str, inputs):
        if not name.startswith("@"):
            yield name
            continue
        path = name[1:]

        def read(path: str = path) -> bytes:
            files, place = driver_of(path)
            return bytes(files.cat_file(place))

        try:
            content = query(path, read) if is_url(path) else Path(path).read_bytes()
            lines = content.decode(TEXT_ENCODING).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"cannot be read ({error}); name a text file with one path per line"
            raise InputError(f"the list {path} {reason}") from error
        yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _expand(name: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(name)
    if not path.exists() and glob.has_magic(name):
        matches = [Path(match) for match in glob.glob(name, recursive=True) if match.endswith(suffixes)]
        if not matches:
            raise InputError(f"{name} matches no document file; it must match {', '.join(suffixes)} files")
        return matches
    if path.is_dir():
        return _search(path, suffixes)
    if not path.exists():
        raise InputError(f"{path} does not exist; name an existing document file or folder")
    if suffixes == CHAT_SUFFIXES and path.name.endswith(TEXT_SUFFIXES):
        raise InputError(f"{path} is plain text, which holds no conversation; leave it out, or prepare without --chat")
    if not path.name.endswith(suffixes):
        raise InputError(f"{path} is not a document file; its name must end in one of {', '.join(suffixes)}")
    return [path]


def _search(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=_refuse_unread) for name in names]
    files = [path for path in paths if path.name.endswith(suffixes) and not path.name.endswith(NOT_SEARCHED_FOR)]
    if not files:
        raise InputError(f"{folder} holds no document file; a folder must hold {', '.join(suffixes)} files")
    if others := set(paths).difference(files):
        show([f"{folder}: {plural(len(others), 'file')} of other kinds passed over, such as {min(others)}"])
    return files


def _refuse_unread(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be searched ({error.strerror}), its files would be missing; make it readable"
    ) from error
