"""Describes token files: from their manifest if there is one, and from the files themselves; torch is not imported."""

from pathlib import Path

import msgspec

from megatron_fanformer.data.blends import parse_blend
from megatron_fanformer.data.chat_files import MASK_SUFFIX, count_learned, is_row_folder, open_chats
from megatron_fanformer.data.ledger import open_ledger
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, Manifest, read_any_manifest, token_files_record
from megatron_fanformer.data.npy_files import SUFFIX, NpyType, open_npy_files
from megatron_fanformer.data.remote_files import find
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.recognition import Target
from megatron_fanformer.inspection.report import Report
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import is_url

NPY_DTYPE: NpyType = "uint16"  # of the paper's files, which do not state it


def describe_data(target: Target) -> Report:
    """Describe token files: one prefix, or all that a blend or a folder names.

    Raises:
        InputError: files that are missing.
        CorruptError: files that cannot be read, or disagree with their index.
    """
    parts = [describe_prefix(prefix) for prefix in target.prefixes]
    if target.kind == "token files":
        return parts[0]
    documents = [part["documents"] for part in parts]
    report: Report = {
        "kind": target.kind,
        "path": str(target.path),
        "documents": None if None in documents else sum(documents),
        "tokens": sum(part["tokens"] for part in parts),
    }
    if target.kind == "blend":
        blend = parse_blend([f"@{target.path}"])
        if blend.weights is None:
            report["sources"] = [{"source": path} for source in blend.sources for path in source.paths]
        else:
            report["sources"] = [
                {"weight": weight, "source": ", ".join(source.paths)}
                for weight, source in zip(blend.weights, blend.sources, strict=True)
            ]
    return {**report, "parts": parts}


def describe_prefix(prefix: str) -> Report:
    """Describe the token files of one prefix."""
    manifest, ledger = read_any_manifest(prefix), None
    if isinstance(manifest, Manifest) and token_files_record(prefix) is None:
        facts = {
            "format": "parts",
            "documents": manifest.documents,
            "tokens": manifest.tokens,
            "dtype": manifest.settings.dtype,
            "bytes": sum(file.bytes for output in manifest.outputs for file in output.files.values()),
        }
    else:
        facts, ledger = _describe_files(prefix), open_ledger(prefix)
    return {
        "path": prefix,
        "kind": "token files",
        "prefix": prefix,
        **facts,
        "ledger": {"path": str(ledger.path), "rows": ledger.rows} if ledger else None,
        "manifest": {"path": prefix + MANIFEST_SUFFIX, **msgspec.to_builtins(manifest)} if manifest else None,
    }


def _describe_files(prefix: str) -> Report:
    stated = token_files_record(prefix)
    if is_row_folder(prefix) or Path(prefix + MASK_SUFFIX).exists():
        return _describe_chats(prefix)
    if _is_there(prefix, ".bin") or _is_there(prefix, ".idx"):
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
    elif _is_there(prefix, SUFFIX):
        (file,) = open_npy_files([prefix + SUFFIX], NPY_DTYPE)
        total = file.tokens * file.dtype.itemsize
        facts = {"format": "npy", "documents": None, "tokens": file.tokens, "dtype": file.dtype.name, "bytes": total}
    else:
        raise InputError(
            f"{prefix} has no token files, only the files that go with them; copy its .bin and .idx, or .npy"
        )
    return facts if stated is None else {**facts, "documents": stated.documents}


def _describe_chats(prefix: str) -> Report:
    """Describe a prefix of conversations; learned tokens are counted where no manifest states them."""
    chats, stated = open_chats(prefix), token_files_record(prefix)
    learned = None if stated is None else stated.learned_tokens
    stored = chats.mask_path.stat().st_size  # with padding
    tokens = int(chats.lengths.sum())
    facts = {
        "format": "chat rows" if is_row_folder(prefix) else "chats",
        "documents": len(chats),
        "tokens": stored,
        "padding": stored - tokens,
        "learned_tokens": count_learned(chats.mask_path) if learned is None else learned,
        "cut": None if stated is None else stated.cut,
        "dtype": chats.dtype.name,
        "bytes": stored * chats.dtype.itemsize,
    }
    if len(chats):
        facts |= {"shortest": int(chats.lengths.min()), "longest": int(chats.lengths.max())}
    return facts


def _is_there(prefix: str, suffix: str) -> bool:
    return find(prefix + suffix) is not None if is_url(prefix) else Path(prefix + suffix).exists()
