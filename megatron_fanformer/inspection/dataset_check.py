"""Checks token files against their manifest: bytes, index, ledger and counts."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_fanformer.data.chat_files import IDS_NPY, MASK_NPY, MASK_SUFFIX, count_learned
from megatron_fanformer.data.ledger import LEDGER_SUFFIX, open_ledger
from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    FileRecord,
    Manifest,
    PartManifest,
    TokenFiles,
    read_any_manifest,
)
from megatron_fanformer.data.remote_files import find, open_stream
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.formats.recognition import Target
from megatron_fanformer.inspection.report import reading
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import plural, size

TOKEN_ENDINGS = (".bin", ".npy", IDS_NPY)
MASK_ENDINGS = (MASK_SUFFIX, MASK_NPY)
BLOCK_BYTES = 1 << 22
THREADS = 8  # more only make the disk seek


def check_data(target: Target) -> str:
    """Check every token file of `target` against its manifest; returns what agrees.

    Raises:
        InputError: there is no manifest.
        CorruptError: something differs; names the file, and what.
    """
    manifests = {prefix: _manifest(prefix) for prefix in target.prefixes}
    for prefix, manifest in manifests.items():
        if isinstance(manifest, Manifest):
            _check_counts(prefix, manifest)
    outputs = [(prefix, manifest, each) for prefix, manifest in manifests.items() for each in _outputs(manifest)]
    files = {
        beside(prefix, record.path): (record, manifest.settings.dtype if ending in TOKEN_ENDINGS else None)
        for prefix, manifest, output in outputs
        for ending, record in output.files.items()
    }
    total = sum(record.bytes for record, _ in files.values())
    with reading(total) as advance, ThreadPoolExecutor(min(THREADS, usable_cores())) as pool:
        found = pool.map(lambda path: _check_file(path, *files[path], advance), files)
        largest = dict(zip(files, found, strict=True))
    for prefix, manifest, output in outputs:
        _check_output(prefix, output, manifest, largest)
    return (
        f"SHA-256 of {plural(len(files), 'file')}, {size(total)}; index,"
        f" ledger and manifest agree on {plural(sum(output.documents for *_, output in outputs), 'document')} and"
        f" {plural(sum(output.tokens for *_, output in outputs), 'token')}"
    )


def _manifest(prefix: str) -> Manifest | PartManifest:
    manifest = read_any_manifest(prefix)
    if manifest is None:
        raise InputError(
            f"{prefix}{MANIFEST_SUFFIX} does not exist, and without it there is nothing to verify {prefix} against"
        )
    if is_url(prefix) and manifest.settings.chat is not None:
        raise InputError(f"{prefix} holds conversations, which are verified on this machine; copy them here")
    return manifest


def beside(prefix: str, name: str) -> str:
    """Return the path or URL of a file that a manifest names."""
    folder, slash, _ = prefix.rpartition("/")
    return folder + slash + name


def _outputs(manifest: Manifest | PartManifest) -> list[TokenFiles]:
    return manifest.outputs if isinstance(manifest, Manifest) else [manifest.output]


def _check_counts(prefix: str, manifest: Manifest) -> None:
    path = prefix + MANIFEST_SUFFIX
    for name in ("documents", "tokens"):
        of_outputs = sum(getattr(output, name) for output in manifest.outputs)
        _compare(path, f"{name} and those of its outputs", getattr(manifest, name), of_outputs)
    accounted = manifest.documents + sum(manifest.refused.values())
    _compare(path, "lines_read and its documents and refused lines", manifest.lines_read, accounted)
    for output in manifest.outputs:
        part = beside(prefix, output.prefix)
        record = read_any_manifest(part)
        if record is not None and output not in _outputs(record):
            raise CorruptError(f"{part}{MANIFEST_SUFFIX} and {path} describe its files differently; prepare it again")


def _check_file(path: str, record: FileRecord, dtype: str | None, advance: Callable[[int], None]) -> int:
    """Compare a file's bytes with its manifest; returns its largest token id, -1 if it holds none (`dtype` is None)."""
    digest, largest = hashlib.sha256(), -1
    try:
        remote = find(path) if is_url(path) else None
        if is_url(path) and remote is None:
            raise CorruptError(f"{path}, which its manifest lists, is not there; copy or prepare it again")
        found = Path(path).stat().st_size if remote is None else remote.size
        if found != record.bytes:
            raise CorruptError(
                f"{path} holds {found} bytes where its manifest says {record.bytes}; copy or prepare it again"
            )
        with Path(path).open("rb") if remote is None else open_stream(remote) as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
                if dtype is not None and len(block) % np.dtype(dtype).itemsize == 0:
                    largest = max(largest, int(np.frombuffer(block, dtype).max()))
                advance(len(block))
    except OSError as error:
        raise CorruptError(f"{path}, which its manifest lists, cannot be read ({error.strerror})") from error
    if (sha256 := digest.hexdigest()) != record.sha256:
        raise CorruptError(
            f"{path} has SHA-256 {sha256} where its manifest says {record.sha256}; copy or prepare it again"
        )
    return largest


def _check_output(whole: str, output: TokenFiles, manifest: Manifest | PartManifest, largest: dict[str, int]) -> None:
    prefix = beside(whole, output.prefix)
    path, lengths = prefix + MANIFEST_SUFFIX, None
    ending, tokens_file = next((end, record) for end, record in output.files.items() if end in TOKEN_ENDINGS)
    if ".idx" in output.files:
        index = read_index(prefix, cache=cache_of(prefix))
        lengths = index.lengths
        _compare(path, f"documents and those of {prefix}.idx", output.documents, len(lengths))
        _compare(path, f"tokens and those of {prefix}.idx", output.tokens, index.tokens)
    else:
        tokens = tokens_file.bytes // np.dtype(manifest.settings.dtype).itemsize
        _compare(path, f"tokens and those of {prefix}{ending}", output.tokens, tokens)
    if output.tokens:
        found = largest[beside(whole, tokens_file.path)]
        _compare(path, "max_token_id and the largest in the token file", output.max_token_id, found)
    for end in MASK_ENDINGS:
        if end in output.files:
            _compare(path, f"tokens and bytes of {prefix}{end}", output.tokens, output.files[end].bytes)
            learned = count_learned(Path(beside(whole, output.files[end].path)))
            _compare(path, f"learned_tokens and those of {prefix}{end}", output.learned_tokens, learned)
    if ".ledger.parquet" in output.files:
        # A ledger of chats has rows of refused lines, too; of a whole that was merged, each list's own.
        own = read_any_manifest(prefix)
        refused = own.refused if isinstance(own, Manifest) and own.settings.chat is not None else {}
        check_ledger(prefix, output, lengths, refused=sum(refused.values()))


def check_ledger(prefix: str, output: TokenFiles, lengths: np.ndarray | None, *, refused: int = 0) -> None:
    """Check a ledger against the lengths in the index or, for a .npy file, against its number of tokens.

    Args:
        refused: the rows without tokens that it must have, each of a refused conversation.

    Raises:
        CorruptError: a row differs.
    """
    path = prefix + LEDGER_SUFFIX
    if (ledger := open_ledger(prefix)) is None:
        raise CorruptError(f"{path} is not there; copy or prepare it again")
    _compare(path, f"rows and the documents of {prefix}{MANIFEST_SUFFIX}", ledger.rows - refused, output.documents)
    row, token = 0, 0
    for first_tokens, own_lengths in ledger.spans():
        if refused:
            first_tokens, own_lengths = first_tokens[own_lengths > 0], own_lengths[own_lengths > 0]
        expected = own_lengths if lengths is None else np.asarray(lengths[row : row + len(own_lengths)])
        _compare_rows(path, row, "length", own_lengths, expected)
        ends = token + np.cumsum(expected, dtype=np.int64)
        _compare_rows(path, row, "first_token", first_tokens, ends - expected)
        row, token = row + len(expected), int(ends[-1]) if len(ends) else token
    _compare(path, "the end of its last document and the token file's", token, output.tokens)


def _compare_rows(path: str, row: int, name: str, found: np.ndarray, expected: np.ndarray) -> None:
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        at = int(wrong[0])
        raise CorruptError(
            f"{path} has {name} {found[at]} in row {row + at} (from 0) where the token files have {expected[at]},"
            " so it belongs to other files; copy or prepare it again"
        )


def _compare(path: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CorruptError(f"{path}: {what} differ ({found} and {expected}); copy or prepare it again")
