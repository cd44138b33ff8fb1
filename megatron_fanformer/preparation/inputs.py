"""Input files of a preparation: files, folders, glob patterns and lists of them, in one fixed order."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError

LINE_KINDS, TEXT_KINDS = (".jsonl", ".json", ".ndjson"), (".txt", ".md")
LINE_SUFFIXES, TEXT_SUFFIXES = (
    tuple(kind + compression for kind in kinds for compression in ("", ".gz", ".zst"))
    for kinds in (LINE_KINDS, TEXT_KINDS)
)
PARQUET_SUFFIX = ".parquet"
CHAT_SUFFIXES = (*LINE_SUFFIXES, PARQUET_SUFFIX)
DOCUMENT_SUFFIXES = (*CHAT_SUFFIXES, *TEXT_SUFFIXES)
NPY_SUFFIXES = (".npy",)
LARGEST_LIST_BYTES = 1 << 28  # of @LIST: a million paths are smaller, and a file of documents named by mistake is not
# Found in a folder, these are a preparation's own: manifests and ledgers, not documents.
NOT_SEARCHED_FOR = (".json", ".ledger.parquet")


def expand_inputs(inputs: Iterable[str | Path], suffixes: Sequence[str] = DOCUMENT_SUFFIXES) -> list[Path]:
    """Return the files that `inputs` name, sorted by path, so that their order does not depend on how they were named.

    An input is a file, a folder (searched through), a glob pattern, or `@FILE`, a list of these, one per line
    (empty lines and those that begin with # are skipped). Plain `.json` files are taken only if named.

    Raises:
        InputError: no input, a path that does not exist, a file of another kind, a folder or a pattern
            without files, or a file named twice.
    """
    files = [file for name in _with_lists(inputs) for file in _expand(name, tuple(suffixes))]
    if not files:
        raise InputError("no input; name at least one document file or a folder of them")
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise InputError(f"{file} is named twice among the inputs, its documents would count double; name it once")
        seen.add(file.resolve())
    return sorted(files)


def _with_lists(inputs: Iterable[str | Path]) -> Iterator[str]:
    for name in map(str, inputs):
        if not name.startswith("@"):
            yield name
            continue
        try:
            lines = regular_file(Path(name[1:]), most_bytes=LARGEST_LIST_BYTES).read_text(encoding="utf-8").splitlines()
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
    names = (path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.is_file())
    files = [path for path in names if not path.name.endswith(NOT_SEARCHED_FOR)]
    if not files:
        raise InputError(f"{folder} holds no document file; a folder must hold {_kinds(suffixes)} files")
    return files


def _kinds(suffixes: Sequence[str]) -> str:
    return ", ".join(suffixes)
