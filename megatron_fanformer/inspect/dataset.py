"""Describes token files, and verifies them against their manifest; this module does not import torch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.convert.recognition import Target
from megatron_fanformer.data.chats import MASK_SUFFIX, is_row_folder, open_chats
from megatron_fanformer.data.ledger import open_ledger
from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    FileRecord,
    TokenFiles,
    read_manifest,
    read_record,
)
from megatron_fanformer.data.remote_files import find_file, open_stream
from megatron_fanformer.data.token_files import NPY_SUFFIX, NpyType, open_npy_files, read_index
from megatron_fanformer.durable_files import sha256_of_stream
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import READ_BYTES, is_url
from megatron_fanformer.terminal import plural, size

THREADS = 8  # with more, a disk spends its time on seeking
NPY_DTYPE: NpyType = "uint16"  # the type of the paper's files, which do not state one

Report = dict[str, Any]


def describe_data(target: Target) -> Report:
    """Describe the token files of one prefix, or those of all prefixes in a folder.

    Raises:
        InputError: a file is missing.
        CorruptError: a file cannot be read, or disagrees with its index.
    """
    parts = [describe_prefix(prefix) for prefix in target.prefixes]
    if target.kind == "token files":
        return parts[0]
    documents = [part["documents"] for part in parts]
    return {
        "kind": target.kind,
        "path": str(target.path),
        "documents": None if None in documents else sum(documents),
        "tokens": sum(part["tokens"] for part in parts),
        "parts": parts,
    }


def describe_prefix(prefix: str) -> Report:
    """Describe the token files of one prefix."""
    manifest, facts, ledger = read_manifest(prefix), _describe_files(prefix), open_ledger(prefix)
    return {
        "path": prefix,
        "kind": "token files",
        "prefix": prefix,
        **facts,
        "ledger": {"path": str(ledger.path), "rows": ledger.rows} if ledger else None,
        "manifest": {"path": prefix + MANIFEST_SUFFIX, **msgspec.to_builtins(manifest)} if manifest else None,
    }


def _describe_files(prefix: str) -> Report:
    """Return the format, the type and the numbers of documents, tokens and bytes; InputError if no file has tokens."""
    record = read_record(prefix)
    if is_row_folder(prefix) or Path(prefix + MASK_SUFFIX).exists():
        return _describe_chats(prefix)
    if _file_exists(prefix, ".bin") or _file_exists(prefix, ".idx"):
        index = read_index(prefix, cache=cache_of(prefix))
        facts: Report = {
            "format": "megatron",
            "documents": index.documents,
            "sequences": index.sequences,
            "tokens": index.tokens,
            "dtype": index.dtype.name,
            "bytes": index.tokens * index.dtype.itemsize,
        }
        if index.sequences:
            facts |= {"shortest": int(index.lengths.min()), "longest": int(index.lengths.max())}
    elif _file_exists(prefix, NPY_SUFFIX):
        (file,) = open_npy_files([prefix + NPY_SUFFIX], NPY_DTYPE)
        total = file.tokens * file.dtype.itemsize
        facts = {"format": "npy", "documents": None, "tokens": file.tokens, "dtype": file.dtype.name, "bytes": total}
    else:
        raise InputError(
            f"{prefix} has no token files, only the files that go with them; copy its .bin and .idx, or .npy"
        )
    return facts if record is None else {**facts, "documents": record.documents}


def _describe_chats(prefix: str) -> Report:
    """Return the facts of `_describe_files` for a prefix of conversations; `tokens` includes the padding of rows."""
    chats, record = open_chats(prefix), read_record(prefix)
    stored = chats.mask_path.stat().st_size  # one byte a token, with padding
    tokens = int(chats.lengths.sum())
    facts = {
        "format": "chat rows" if is_row_folder(prefix) else "chats",
        "documents": len(chats),
        "tokens": stored,
        "padding": stored - tokens,
        "learned_tokens": None if record is None else record.learned_tokens,
        "cut": None if record is None else record.cut,
        "dtype": chats.dtype.name,
        "bytes": stored * chats.dtype.itemsize,
    }
    if len(chats):
        facts |= {"shortest": int(chats.lengths.min()), "longest": int(chats.lengths.max())}
    return facts


def _file_exists(prefix: str, suffix: str) -> bool:
    return find_file(prefix + suffix) is not None if is_url(prefix) else Path(prefix + suffix).exists()


# -- verification


def check_data(target: Target) -> str:
    """Check every token file of `target` against its manifest; return a line that says what was checked.

    Raises:
        InputError: there is no manifest.
        CorruptError: a file is missing or damaged, or a number of documents or tokens differs.
    """
    outputs: list[tuple[str, TokenFiles, int]] = []
    """The folder of a prefix, an output in the prefix's manifest, and the number of conversations that were refused."""
    for prefix in target.prefixes:
        manifest = read_manifest(prefix)
        if manifest is None:
            raise InputError(
                f"{prefix}{MANIFEST_SUFFIX} does not exist, and without it there is nothing to verify {prefix} against"
            )
        if is_url(prefix) and manifest.settings.chat is not None:
            raise InputError(f"{prefix} holds conversations, which are verified on this machine; copy them here")
        folder = prefix[: prefix.rfind("/") + 1]
        refused = sum(manifest.refused.values()) if manifest.settings.chat is not None else 0
        outputs += [(folder, output, refused) for output in manifest.outputs]
    files = {folder + record.path: record for folder, output, _ in outputs for record in output.files.values()}
    with ThreadPoolExecutor(min(THREADS, usable_cores())) as pool:
        list(pool.map(_check_file, files, files.values()))  # `list` raises the error of a file; `map` alone does not
    for folder, output, refused in outputs:
        _check_counts(folder + output.prefix, output, refused)
    return (
        f"SHA-256 of {plural(len(files), 'file')}, {size(sum(file.bytes for file in files.values()))}; index,"
        f" ledger and manifest agree on {plural(sum(output.documents for _, output, _ in outputs), 'document')} and"
        f" {plural(sum(output.tokens for _, output, _ in outputs), 'token')}"
    )


def _check_file(path: str, record: FileRecord) -> None:
    """Raise CorruptError if a file is missing, or has another size or SHA-256 than its record in the manifest."""
    try:
        remote = find_file(path) if is_url(path) else None
        if is_url(path) and remote is None:
            raise CorruptError(f"{path}, which its manifest lists, is not there; copy or prepare it again")
        stored = Path(path).stat().st_size if remote is None else remote.size
        if stored != record.bytes:
            raise CorruptError(
                f"{path} holds {stored} bytes where its manifest says {record.bytes}; copy or prepare it again"
            )
        with Path(path).open("rb") if remote is None else open_stream(remote, block_size=READ_BYTES) as stream:
            sha256 = sha256_of_stream(stream)
    except OSError as error:
        raise CorruptError(f"{path}, which its manifest lists, cannot be read ({error.strerror})") from error
    if sha256 != record.sha256:
        raise CorruptError(
            f"{path} has SHA-256 {sha256} where its manifest says {record.sha256}; copy or prepare it again"
        )


def _check_counts(prefix: str, output: TokenFiles, refused: int) -> None:
    """Raise CorruptError if a manifest states other numbers of documents or tokens than the index or the ledger holds.

    `refused` conversations have rows in the ledger, but are not documents.
    """
    comparisons: list[tuple[str, int, int]] = []
    """What the message calls the two counts; the count in the manifest; the count in the file."""
    if ".idx" in output.files:
        index = read_index(prefix, cache=cache_of(prefix))
        comparisons.append(("documents and those of its index", output.documents, len(index.lengths)))
        comparisons.append(("tokens and those of its index", output.tokens, index.tokens))
    if ".ledger.parquet" in output.files and (ledger := open_ledger(prefix)) is not None:
        comparisons.append(("documents and the rows of its ledger", output.documents + refused, ledger.rows))
    for compared, stated, counted in comparisons:
        if stated != counted:
            raise CorruptError(
                f"{prefix}{MANIFEST_SUFFIX}: {compared} differ ({stated} and {counted}); copy or prepare it again"
            )
