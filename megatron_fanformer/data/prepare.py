"""From Dolma documents to Megatron token files.

Here: what is asked, whether it can be done, and whether it is done already. The work itself is `pipeline`'s.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.documents import DocumentParser, expand_inputs
from megatron_fanformer.data.manifest import (
    InputRecord,
    Manifest,
    Settings,
    TokenizerRecord,
    manifest_path,
    read_manifest,
    sha256_of,
)
from megatron_fanformer.data.pipeline import Job, Pipeline, ProgressListener
from megatron_fanformer.data.token_files import bin_path, idx_path, token_dtype
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to tokenize, and how."""

    inputs: tuple[str, ...]
    """Document files (.jsonl, .jsonl.gz, .json.gz) and folders of them."""
    output: str
    """Prefix of the token files: PREFIX.bin, PREFIX.idx, PREFIX.manifest.json."""
    tokenizer: str
    """A sentencepiece .model, a Hugging Face tokenizer.json, or a folder that holds one."""
    text_field: str = "text"
    """The field of a document that is its text."""
    eod_id: int | None = None
    """The id that ends a document; None: the tokenizer's own end-of-text piece."""
    workers: int = field(default_factory=available_cores)
    """Worker processes, at least 1. They do not change the output."""
    strict: bool = False
    """Stop at the first line that is no document, instead of counting it."""


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What `prepare` did, or found done."""

    prefix: str
    already_there: bool
    """The same preparation had been done before: nothing was written."""
    manifest: Manifest


def prepare(config: PrepareConfig, progress: ProgressListener | None = None) -> PrepareReport:
    """Tokenize all documents of the inputs into one pair of token files and their manifest.

    Each document becomes one sequence, ended by the end-of-text id. Lines that are no documents are counted
    by reason. Where the same preparation is complete already, nothing is done. `progress` is called after
    every block.

    Raises:
        InputError: missing or unusable input, tokenizer or output; an output prefix that exists with other
            settings; no document at all; under `strict`, the first refused line.
        CorruptError: a truncated or damaged input file.
        FanformerError: a worker process died, or the disk is full.
    On any of them no token file is left.
    """
    job = _check(config)
    existing = _existing(job)
    if existing is not None:
        return PrepareReport(prefix=config.output, already_there=True, manifest=existing)
    manifest = Pipeline(job, progress).run()
    return PrepareReport(prefix=config.output, already_there=False, manifest=manifest)


def _check(config: PrepareConfig) -> Job:
    if config.workers < 1:
        raise InputError(f"workers is {config.workers}: it must be at least 1")
    DocumentParser(config.text_field)  # refuses an impossible name before any worker does
    files = expand_inputs(config.inputs)
    tokenizer = load_tokenizer(config.tokenizer, eod_id=config.eod_id)
    record = TokenizerRecord(
        path=str(tokenizer.path),
        sha256=sha256_of(tokenizer.path),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
    )
    settings = Settings(text_field=config.text_field, dtype=token_dtype(tokenizer.vocab_size))
    return Job(
        files=files,
        output=config.output,
        tokenizer=record,
        settings=settings,
        workers=config.workers,
        strict=config.strict,
    )


def _existing(job: Job) -> Manifest | None:
    """The manifest of the same preparation, already complete; None where the prefix is free."""
    prefix = job.output
    standing = [path for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)) if path.exists()]
    if not standing:
        return None
    remedy = "choose another output prefix, or remove its .bin, .idx and .manifest.json files"
    manifest = read_manifest(prefix)
    if manifest is None or len(standing) < 3 or not _outputs_stand(prefix, manifest):
        raise InputError(f"{standing[0]} exists, and is no complete preparation with its manifest: {remedy}")
    difference = _difference(job, manifest)
    if difference:
        raise InputError(f"output prefix {prefix} exists already with {difference}: {remedy}")
    if job.strict and manifest.refused:
        raise InputError(f"{manifest.refused_examples[0]} (and the prefix {prefix} exists without it: {remedy})")
    return manifest


def _outputs_stand(prefix: str, manifest: Manifest) -> bool:
    sizes = (bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size)
    return sizes == (manifest.outputs.bin.bytes, manifest.outputs.idx.bytes)


def _difference(job: Job, manifest: Manifest) -> str | None:
    """In what the standing output was made otherwise, in words."""
    for name in ("text_field", "dtype"):
        if getattr(job.settings, name) != getattr(manifest.settings, name):
            return f"{name} {getattr(manifest.settings, name)!r} and not {getattr(job.settings, name)!r}"
    if job.tokenizer.sha256 != manifest.tokenizer.sha256:
        return f"another tokenizer ({manifest.tokenizer.path})"
    if job.tokenizer.eod_id != manifest.tokenizer.eod_id:
        return f"eod_id {manifest.tokenizer.eod_id} and not {job.tokenizer.eod_id}"
    same = len(job.files) == len(manifest.inputs) and all(map(_same_input, job.files, manifest.inputs))
    return None if same else f"other inputs ({len(manifest.inputs)} files, {manifest.inputs[0].path} first)"


def _same_input(file: Path, record: InputRecord) -> bool:
    """Whether a file has the recorded content; read only where its time or place has changed."""
    status = file.stat()
    if status.st_size != record.bytes:
        return False
    untouched = os.path.abspath(file) == record.path and status.st_mtime_ns == record.modified_ns
    return untouched or sha256_of(file) == record.sha256
