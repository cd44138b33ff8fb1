"""Describes token files: from their manifest if there is one, and from the files themselves; torch is not imported."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.data.blends import parse_blend
from megatron_fanformer.data.chat_files import MASK_SUFFIX, count_learned, is_row_folder, open_chats
from megatron_fanformer.data.identity import SHOWN_DIGITS
from megatron_fanformer.data.ledger import open_ledger
from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    Manifest,
    PartManifest,
    Settings,
    read_any_manifest,
    token_files_record,
)
from megatron_fanformer.data.npy_files import SUFFIX, NpyType, open_npy_files
from megatron_fanformer.data.remote_files import find
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.recognition import Target
from megatron_fanformer.inspection.report import Report
from megatron_fanformer.runtime.device import cache_of
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import plural, size, some

NPY_DTYPE: NpyType = "uint16"  # of the paper's files, which do not state it
TITLES = {
    "megatron": "Megatron token files",
    "npy": "token file without a header",
    "chats": "chats as Megatron token files",
    "chat rows": "chats in rows without a header",
    "parts": "token files in parts",
}

Rows = list[tuple[str, str]]


def describe_data(target: Target) -> Report:
    """Describe token files: one prefix, or all that a blend or a folder names.

    Raises:
        InputError: files that are missing.
        CorruptError: files that cannot be read, or disagree with their index.
    """
    parts = [describe_prefix(prefix) for prefix in target.prefixes]
    if target.kind == "token files":
        return parts[0]
    documents = [part.facts.get("documents") for part in parts]
    known = [count for count in documents if count is not None]
    facts: dict[str, Any] = {
        "kind": target.kind,
        "path": str(target.path),
        "documents": sum(known) if len(known) == len(documents) else None,
        "tokens": sum(part.facts["tokens"] for part in parts),
        "parts": [part.facts for part in parts],
    }
    rows = [("tokens", f"{facts['tokens']:,} in {plural(len(parts), 'part')}")]
    if facts["documents"] is not None:
        rows.insert(0, ("documents", f"{facts['documents']:,}"))
    if target.kind == "blend":
        blend = parse_blend([f"@{target.path}"])
        facts["sources"] = (
            [{"source": path} for source in blend.sources for path in source.paths]
            if blend.weights is None
            else [
                {"weight": weight, "source": ", ".join(source.paths)}
                for weight, source in zip(blend.weights, blend.sources, strict=True)
            ]
        )
        rows.append(("sources", some(" ".join(map(str, source.values())) for source in facts["sources"])))
    for part in facts["parts"]:  # a line each: a run's shards may be thousands
        counted = "" if part["documents"] is None else f"{plural(part['documents'], 'document')}, "
        tokens = f"{part['tokens']:,} {part['dtype']} tokens"
        beside = ", ".join(name for name in ("manifest", "ledger") if part.get(name)) or "neither manifest nor ledger"
        rows.append(("", f"{part['prefix']}: {part['format']}, {counted}{tokens}, {beside}"))
    return Report(f"{target.path}: {target.kind}", facts, rows)


def describe_prefix(prefix: str) -> Report:
    """Describe the token files of one prefix."""
    manifest = read_any_manifest(prefix)
    if isinstance(manifest, Manifest) and token_files_record(prefix) is None:
        form, facts, rows = _of_parts(manifest)
    else:
        form, facts, rows = _of_files(prefix)
        if (ledger := open_ledger(prefix)) is not None:
            facts["ledger"] = {"path": str(ledger.path), "rows": ledger.rows}
            rows.append(("ledger", plural(ledger.rows, "row")))
        else:
            facts["ledger"] = None
            rows.append(("ledger", "none: a token's document is unknown"))
    if manifest is None:
        stated = None
        rows.append(("manifest", "none: these files were not written by prepare"))
    else:
        stated = {"path": prefix + MANIFEST_SUFFIX, **msgspec.to_builtins(manifest)}
        rows += _manifest_rows(manifest)
    facts = {"kind": "token files", "format": form, "prefix": prefix, **facts, "manifest": stated}
    return Report(f"{prefix}: {TITLES[form]}", facts, rows)


def _of_parts(manifest: Manifest) -> tuple[str, dict[str, Any], Rows]:
    outputs = manifest.outputs
    files = [record for output in outputs for record in output.files.values()]
    rows = [
        ("documents", f"{manifest.documents:,}"),
        (
            "tokens",
            f"{manifest.tokens:,} of {manifest.settings.dtype} in {plural(len(outputs), 'part')},"
            f" {size(sum(file.bytes for file in files))}; largest id {manifest.max_token_id}",
        ),
        ("parts", some(output.prefix for output in outputs)),
    ]
    facts = {"documents": manifest.documents, "tokens": manifest.tokens, "dtype": manifest.settings.dtype}
    return "parts", facts, rows


def _of_files(prefix: str) -> tuple[str, dict[str, Any], Rows]:
    stated = token_files_record(prefix)
    largest = f"; largest id {stated.max_token_id}" if stated else ""
    if is_row_folder(prefix) or Path(prefix + MASK_SUFFIX).exists():
        return _of_chats(prefix, largest)
    lengths = ""
    if _is_there(prefix, ".bin") or _is_there(prefix, ".idx"):
        form, index = "megatron", read_index(prefix, cache=cache_of(prefix))
        facts: dict[str, Any] = {
            "documents": index.documents,
            "sequences": index.sequences,
            "tokens": index.tokens,
            "dtype": index.dtype.name,
            "bytes": index.tokens * index.dtype.itemsize,
        }
        if index.sequences:
            facts |= {"shortest": int(index.lengths.min()), "longest": int(index.lengths.max())}
            each = "" if index.documents == index.sequences else f" in {plural(index.sequences, 'sequence')}"
            lengths = each + _lengths(facts, index.tokens / index.sequences)
    elif _is_there(prefix, SUFFIX):
        (file,) = open_npy_files([prefix + SUFFIX], NPY_DTYPE)
        form, total = "npy", file.tokens * file.dtype.itemsize
        facts = {"documents": None, "tokens": file.tokens, "dtype": file.dtype.name, "bytes": total}
    else:
        raise InputError(
            f"{prefix} has no token files, only the files that go with them; copy its .bin and .idx, or .npy"
        )
    if stated is not None:
        facts = {**facts, "documents": stated.documents}
    rows = [("documents", f"{facts['documents']:,}{lengths}")] if facts["documents"] is not None else []
    rows.append(("tokens", f"{facts['tokens']:,} of {facts['dtype']}, {size(facts['bytes'])}{largest}"))
    return form, facts, rows


def _lengths(facts: dict[str, Any], mean: float) -> str:
    return f", of {facts['shortest']:,} to {facts['longest']:,} tokens, {mean:,.0f} on average"


def _of_chats(prefix: str, largest: str) -> tuple[str, dict[str, Any], Rows]:
    """Describe a prefix of conversations; what is learned is counted where no manifest says it."""
    chats, stated = open_chats(prefix), token_files_record(prefix)
    stated_tokens = None if stated is None else stated.learned_tokens
    learned = count_learned(chats.mask_path) if stated_tokens is None else stated_tokens
    stored = chats.mask_path.stat().st_size  # with padding
    tokens = int(chats.lengths.sum())
    facts = {
        "documents": len(chats),
        "tokens": stored,
        "padding": stored - tokens,
        "learned_tokens": learned,
        "cut": None if stated is None else stated.cut,
        "dtype": chats.dtype.name,
        "bytes": stored * chats.dtype.itemsize,
    }
    lengths = ""
    if len(chats):
        facts |= {"shortest": int(chats.lengths.min()), "longest": int(chats.lengths.max())}
        lengths = _lengths(facts, tokens / len(chats))
    cut = f"; {facts['cut']:,} of them cut" if facts["cut"] else ""
    padding = f", {facts['padding']:,} of them after a row's last learned one" if facts["padding"] else ""
    rows = [
        ("conversations", f"{len(chats):,}{lengths}{cut}"),
        ("tokens", f"{stored:,} of {chats.dtype.name}{padding}, {size(facts['bytes'])}{largest}"),
        ("learned", f"{plural(learned, 'token')}, {learned / max(1, tokens):.1%} without padding"),
    ]
    return "chat rows" if is_row_folder(prefix) else "chats", facts, rows


def _is_there(prefix: str, suffix: str) -> bool:
    return find(prefix + suffix) is not None if is_url(prefix) else Path(prefix + suffix).exists()


def _manifest_rows(manifest: Manifest | PartManifest) -> Rows:
    tokenizer = manifest.tokenizer
    rows = [
        (
            "tokenizer",
            f"{tokenizer.path}: {tokenizer.vocab_size:,} ids, {tokenizer.eod_id} ends a document;"
            f" SHA-256 {tokenizer.sha256[:SHOWN_DIGITS]}…",
        ),
        ("settings", _settings(manifest.settings)),
    ]
    if isinstance(manifest, PartManifest):
        return [*rows, ("part", f"{manifest.part} of the preparation {manifest.whole}")]
    inputs, encoding = manifest.inputs, manifest.encoding
    refused = sum(manifest.refused.values())
    reasons = "; ".join(f"{reason} {count:,}" for reason, count in manifest.refused.items())
    named = some(file.path for file in inputs)
    sources = some(
        f"{name or 'none'} {plural(count.documents, 'document')}, {plural(count.tokens, 'token')}"
        for name, count in (manifest.by_source or {}).items()
    )
    return [
        *rows,
        ("inputs", f"{plural(len(inputs), 'file')}, {size(sum(file.bytes for file in inputs))}: {named}"),
        ("text", f"{size(manifest.text_bytes)} in {plural(manifest.lines_read, 'line')}"),
        *([("sources", sources)] if set(manifest.by_source or ()) - {""} else []),
        ("refused", f"{plural(refused, 'line')}{f': {reasons}' if reasons else ''}"),
        *(("", str(example)) for example in manifest.refused_examples),
        ("encoded by", encoding.backend + (f" ({encoding.reason})" if encoding.reason else "")),
        ("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _settings(settings: Settings) -> str:
    """Return the text field, or those of conversations, and what differs from the defaults."""
    default = Settings(text_field=settings.text_field, dtype=settings.dtype, chat=settings.chat)
    changed = [
        f"{name.replace('_', ' ')} {getattr(settings, name)}"
        for name in settings.__struct_fields__
        if getattr(settings, name) != getattr(default, name)
    ]
    if (chat := settings.chat) is None:
        return ", ".join([f"text field {settings.text_field}", *changed])
    longest = "any length" if chat.max_tokens is None else f"{chat.too_long} at {plural(chat.max_tokens, 'token')}"
    padding = "" if chat.pad_id is None else f", padded with {chat.pad_id}"
    template = hashlib.sha256(chat.template.encode()).hexdigest()[:SHOWN_DIGITS]
    turns = {"all": "all assistant turns learned", "last": "the last assistant turn learned"}[chat.learn]
    return ", ".join([turns, longest + padding, f"template with SHA-256 {template}…", *changed])
