"""Input files of a preparation: files, folders, glob patterns and lists of them, in one fixed order."""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_fanformer.data.blends import TEXT_ENCODING
from megatron_fanformer.data.remote_files import find, is_pattern, listed, look_up, small_file
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.remote_inputs import InputFile, RemoteInput, recorded_path
from megatron_fanformer.stores import is_url, password_problem
from megatron_fanformer.terminal import plural, show

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
LINE_KINDS, TEXT_KINDS = (".jsonl", ".json", ".ndjson"), (".txt", ".md")
LINE_SUFFIXES, TEXT_SUFFIXES = (
    tuple(kind + compression for kind in kinds for compression in ("", *COMPRESSIONS))
    for kinds in (LINE_KINDS, TEXT_KINDS)
)
PARQUET_SUFFIX = ".parquet"
CHAT_SUFFIXES = (*LINE_SUFFIXES, PARQUET_SUFFIX)
DOCUMENT_SUFFIXES = (*CHAT_SUFFIXES, *TEXT_SUFFIXES)
LARGEST_LIST_BYTES = 1 << 28  # of @LIST: a million paths are smaller, and a file of documents named by mistake is not
# Found in a folder, these are a preparation's own: manifests and ledgers, not documents.
NOT_SEARCHED_FOR = (".json", ".ledger.parquet")


def expand_inputs(inputs: Iterable[str | Path], suffixes: Sequence[str] = DOCUMENT_SUFFIXES) -> list[InputFile]:
    """Return the files that `inputs` name, sorted by path, so that their order does not depend on how they were named.

    An input is a file, a folder (searched through), a glob pattern, or `@FILE`, a list of these, one per line
    (empty lines and those that begin with # are skipped). Plain `.json` files are taken only if named. Each may be a
    URL, that of a folder with / at its end; those come last.

    Raises:
        InputError: no input, a path that does not exist, a file of another kind, a folder or a pattern
            without files, a link to no file, a folder that cannot be read, or a file named twice (one that links
            lead to counts once).
        FanformerError: a store does not answer.
    """
    names = list(_with_lists(inputs))
    remote = _remote_inputs([name for name in names if is_url(name)], tuple(suffixes))
    files = _local_inputs([name for name in names if not is_url(name)], suffixes)
    if not (files or remote):
        raise InputError("no input; name at least one document file or a folder of them")
    return [*files, *remote]


def _remote_inputs(urls: Sequence[str], suffixes: tuple[str, ...]) -> list[RemoteInput]:
    """Return the files that URLs name, sorted."""
    found: list[str] = []
    look_up(url for url in urls if glob.has_magic(url) and not url.endswith("/"))
    for url in urls:
        if problem := password_problem("an input", url):
            raise InputError(problem)
        if not (url.endswith("/") or is_pattern(url)):
            if not url.endswith(suffixes):
                raise InputError(f"{url} is not a document file; its name must end in one of {_kinds(suffixes)}")
            found.append(url)
            continue
        matches = listed(f"{url}**/*" if url.endswith("/") else url, suffixes)
        of_folder = [match for match in matches if not match.endswith(NOT_SEARCHED_FOR)]
        if not (chosen := of_folder if url.endswith("/") else matches):
            raise InputError(f"{url} holds no document file; it must hold or match {_kinds(suffixes)} files")
        found += chosen
    twice = next((one for one, other in itertools.pairwise(sorted(found)) if one == other), None)
    if twice:
        raise InputError(f"{twice} is named twice among the inputs, its documents would count double; name it once")
    look_up(found)
    files = {url: find(url) for url in sorted(found)}
    if missing := next((url for url, file in files.items() if file is None), None):
        raise InputError(f"{missing} does not exist; name an existing document file, or a folder with / at its end")
    return [RemoteInput(file) for file in files.values() if file is not None]


def _local_inputs(names: Iterable[str], suffixes: Sequence[str]) -> list[Path]:
    found = (file for name in names for file in _expand(name, tuple(suffixes)))
    files = sorted(found, key=lambda file: Path(recorded_path(file)))
    if twice := next((one for one, other in itertools.pairwise(map(recorded_path, files)) if one == other), None):
        raise InputError(f"{twice} is named twice among the inputs, its documents would count double; name it once")
    chosen: dict[Path, Path] = {}
    for file in files:
        if not os.path.isfile(file):
            what = "a link to no file" if file.is_symlink() else "no file"
            raise InputError(f"{file} is {what}, its documents would be missing; put the file there, or remove it")
        chosen.setdefault(file.resolve(), file)
    if links := len(files) - len(chosen):
        show([f"{plural(links, 'link')} passed over, to files that are counted already"])
    return list(chosen.values())


def _with_lists(inputs: Iterable[str | Path]) -> Iterator[str]:
    for name in map(str, inputs):
        if not name.startswith("@"):
            yield name
            continue
        try:
            if is_url(name[1:]):
                lines = small_file(name[1:], most_bytes=LARGEST_LIST_BYTES).decode(TEXT_ENCODING).splitlines()
            else:
                file = regular_file(Path(name[1:]), most_bytes=LARGEST_LIST_BYTES)
                lines = file.read_text(encoding=TEXT_ENCODING).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"cannot be read ({error}); name a text file with one path per line"
            raise InputError(f"the list {name[1:]} {reason}") from error
        yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _expand(name: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(name)
    if not path.exists() and glob.has_magic(name):
        found = [Path(match) for match in glob.glob(name, recursive=True) if match.endswith(suffixes)]
        if not found:
            raise InputError(f"{name} matches no document file; it must match {_kinds(suffixes)} files")
        return found
    if path.is_dir():
        return _search(path, suffixes)
    if not path.exists():
        raise InputError(f"{path} does not exist; name an existing document file or folder")
    if suffixes == CHAT_SUFFIXES and path.name.endswith(TEXT_SUFFIXES):
        raise InputError(f"{path} is plain text, which holds no conversation; leave it out, or prepare without --chat")
    if not path.name.endswith(suffixes):
        raise InputError(f"{path} is not a document file; its name must end in one of {_kinds(suffixes)}")
    return [path]


def _search(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=_refuse_unread) for name in names]
    files = [path for path in found if path.name.endswith(suffixes) and not path.name.endswith(NOT_SEARCHED_FOR)]
    if not files:
        raise InputError(f"{folder} holds no document file; a folder must hold {_kinds(suffixes)} files")
    if others := set(found).difference(files):
        show([f"{folder}: {plural(len(others), 'file')} of other kinds passed over, such as {min(others)}"])
    return files


def _refuse_unread(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be searched ({error.strerror}), its files would be missing; make it readable"
    ) from error


def _kinds(suffixes: Sequence[str]) -> str:
    return ", ".join(suffixes)
