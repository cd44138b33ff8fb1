"""Check the options of `prepare`, look for a finished result, and let `pipeline` turn the inputs into token files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fanformer.data.chat_template import RenderedChat, encode_chat, find_template, refuse_space_before_texts
from megatron_fanformer.data.chats import NPY_ROW_TOKENS
from megatron_fanformer.data.manifest import ChatSettings, Encoding, Manifest, Settings, TokenizerRecord, read_manifest
from megatron_fanformer.data.token_files import NPY_SUFFIX, token_dtype
from megatron_fanformer.data.tokenizer import Tokenizer, end_of_text_notices, load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.documents import DocumentParser
from megatron_fanformer.prepare.encoded_inputs import difference_of, folder_path, is_unchanged, work_folder
from megatron_fanformer.prepare.encoding import SMALL_INPUT, EncoderChoice, choose_encoder
from megatron_fanformer.prepare.inputs import (
    CHAT_SUFFIXES,
    COMPRESSIONS,
    DOCUMENT_SUFFIXES,
    InputFile,
    RemoteInput,
    expand_inputs,
    recorded_path,
)
from megatron_fanformer.prepare.outputs import check_output
from megatron_fanformer.prepare.pipeline import Job, ProgressListener, encode_shard, merge, run, shard_prefix
from megatron_fanformer.prepare.verb import PrepareConfig, Shard
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime.device import quieten_libraries
from megatron_fanformer.terminal import phases, plural, show

ALREADY_THERE = "{} already exists, made from the same input with the same settings"
COMPRESSED_WEIGHT = 2.5
"""Bytes of text per byte of a compressed file: 2.3 to 2.9 in Dolma's sample documents and this project's pages."""
# Pieces that pad the rows of chats, the most likely first; a tokenizer without one pads with the end of text.
PADDING_NAMES = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """The result of `prepare`."""

    prefix: str
    already_there: bool
    """Whether an earlier call had already written this output, so that this one wrote nothing."""
    manifest: Manifest
    notes: Sequence[str] = ()
    """Lines to show after the counts."""

    def lines(self) -> list[str]:
        """Return lines for the user: what was read, tokenized, cut and refused."""
        manifest, chat = self.manifest, self.manifest.settings.chat
        lines = [ALREADY_THERE.format(self.prefix)] if self.already_there else []
        if chat is None:
            counts = f"{plural(manifest.documents, 'document')}, {plural(manifest.tokens, 'token')}"
        else:
            learned = sum(output.learned_tokens or 0 for output in manifest.outputs)
            padding = "" if chat.pad_id is None else " with padding"
            counts = f"{plural(manifest.documents, 'conversation')}, {manifest.tokens:,} tokens{padding}"
            counts += f", {learned:,} of them learned"
        lines.append(f"{plural(manifest.lines_read, 'line')} read: {counts}")
        num_cut = sum(output.cut or 0 for output in manifest.outputs)
        if chat is not None and num_cut:
            lines.append(f"{plural(num_cut, 'conversation')} cut to {chat.max_tokens:,} tokens")
        lines += [f"{plural(number, 'line')} refused: {reason}" for reason, number in manifest.refused.items()]
        lines += [f"  {example}" for example in manifest.refused_examples]
        if manifest.encoding.reason not in (None, SMALL_INPUT):  # why the fastest library was not used
            lines.append(f"ids by {manifest.encoding.backend}: {manifest.encoding.reason}")
        return [*lines, *self.notes]


def prepare_files(config: PrepareConfig) -> None:
    """Run the verb: prepare everything, one shard, or one output to train on and one to validate on."""
    quieten_libraries()
    with ended_by_stop_signals("before the end; what is done is kept, run the same command to continue"):
        if config.hold_out is not None:
            prepare_both(config, config.hold_out)
            return
        with _progress("preparing") as listener:
            if config.shard is not None:
                lines = prepare_shard(config, config.shard, listener)
            else:
                lines = prepare(config, listener).lines()
        show(lines)


@contextmanager
def _progress(title: str) -> Iterator[ProgressListener]:
    """Show progress under a title, and yield the function that `pipeline` calls to update it."""
    with phases(title) as report:
        yield lambda documents, share: report(title, f"{plural(documents, 'document')}, {share:.0%} of the input")


def prepare(
    config: PrepareConfig, progress: ProgressListener | None = None, *, files: list[InputFile] | None = None
) -> PrepareReport:
    """Tokenize all documents or conversations of the inputs into token files, with a ledger and a manifest.

    Each document becomes one sequence, ended by the end-of-text id. Sequences are in the order of the sorted input
    files and of the lines in them. If the output is already complete, nothing is written. An interrupted preparation
    is continued, and ends with the same bytes.

    Args:
        files: prepare these files alone; a part of `input_files(config)`, in the same order.

    Raises:
        InputError: an input, the tokenizer or the output is missing or unusable, the output exists with other
            settings, no line is a document, or a line is refused under `strict`.
        CorruptError: input files are truncated or damaged; the other files are encoded first, and kept.
        FanformerError: two worker processes died on the same file, or the disk is full.
    """
    job, tokenizer = _job(config, files)
    notes = end_of_text_notices(tokenizer)
    finished = _find_finished(job)
    if finished is not None:
        return PrepareReport(prefix=config.output, already_there=True, manifest=finished, notes=notes)
    if config.merge is not None:
        manifest = merge(job, config.merge)
    else:
        manifest = run(_with_encoder(job, config, tokenizer), progress)
    return PrepareReport(prefix=config.output, already_there=False, manifest=manifest, notes=notes)


def prepare_shard(config: PrepareConfig, shard: Shard, progress: ProgressListener | None = None) -> list[str]:
    """Encode one shard of the inputs for a later merge; return lines for the user. Raises the errors of `prepare`."""
    job, tokenizer = _job(config, None)
    if _find_finished(job) is not None:
        return [ALREADY_THERE.format(config.output)]
    records = encode_shard(_with_encoder(job, config, tokenizer), shard, progress)
    documents, tokens = sum(record.documents for record in records), sum(record.tokens for record in records)
    counts = f"{plural(len(records), 'file')}, {plural(documents, 'document')}, {plural(tokens, 'token')}"
    folder = folder_path(shard_prefix(config.output, shard))
    return [f"shard {shard}: {counts}, in {folder}; when all are done, --merge {shard.count} joins them"]


def _job(config: PrepareConfig, files: list[InputFile] | None) -> tuple[Job, Tokenizer]:
    """Check the options; return the preparation and its tokenizer. `files` None: all input files."""
    _check_options(config)
    files = input_files(config) if files is None else files
    tokenizer = load_tokenizer(config.tokenizer, eod_id=config.eod_id)
    job = Job(
        files=files,
        output=config.output,
        tokenizer=TokenizerRecord(
            path=str(tokenizer.path),
            sha256=sha256_of(tokenizer.path),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
        ),
        settings=_settings(config, tokenizer),
        # Merges and token files need no encoder; for all others, `_with_encoder` replaces this one.
        encoder=EncoderChoice(str(tokenizer.path), tokenizer.eod_id, Encoding(backend="none")),
        workers=config.workers,
        strict=config.strict,
    )
    return job, tokenizer


def _with_encoder(job: Job, config: PrepareConfig, tokenizer: Tokenizer) -> Job:
    """Return the job with the library that computes the token ids; inputs that are token files need none."""
    if config.from_npy:
        return job
    input_bytes = sum(file.stat().st_size for file in job.files)
    return replace(job, encoder=choose_encoder(tokenizer, config.backend, input_bytes))


def input_files(config: PrepareConfig) -> list[InputFile]:
    """Return the files to prepare, sorted by path.

    Raises InputError if there is none, an input is missing or of the wrong kind, or a token file is on another store.
    """
    if not config.from_npy:
        return expand_inputs(config.inputs, CHAT_SUFFIXES if config.chat else DOCUMENT_SUFFIXES)
    files = expand_inputs(config.inputs, (NPY_SUFFIX,))
    for file in files:
        if isinstance(file, RemoteInput):
            raise InputError(f"{file} is on another store, from which from_npy does not read; copy it to this machine")
    return files


def _check_options(config: PrepareConfig) -> None:
    check_output(config.output)
    for name, minimum in (("workers", 1), ("max_tokens", 2)):
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise InputError(f"{name} is {value}; it must be at least {minimum}")
    if config.too_long == "drop" and config.max_tokens is None and config.format != "npy":
        raise InputError("too_long is 'drop', but no conversation is too long without max_tokens; set it")
    DocumentParser(config.text_field)  # raises InputError if no JSON field can have this name


def _settings(config: PrepareConfig, tokenizer: Tokenizer) -> Settings:
    dtype = token_dtype(tokenizer.vocab_size)
    if config.format == "npy":
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"  # the reference's only types
    return Settings(
        text_field="" if config.chat else config.text_field,
        dtype=dtype,
        format=config.format,
        npy_dtype=config.npy_dtype if config.from_npy else None,
        chat=_chat_settings(config, tokenizer) if config.chat else None,
    )


def _chat_settings(config: PrepareConfig, tokenizer: Tokenizer) -> ChatSettings:
    refuse_space_before_texts(tokenizer)
    template = find_template(config.tokenizer, config.chat_template, eod_id=config.eod_id)
    is_npy = config.format == "npy"
    pad_id = tokenizer.eod_id
    padding_pieces = sorted(set(tokenizer.special_pieces).intersection(PADDING_NAMES), key=PADDING_NAMES.index)
    if padding_pieces:
        ids, _ = encode_chat(tokenizer, RenderedChat(padding_pieces[0], learned=[]))  # `encode` may split the piece
        pad_id = int(ids[0])
    return ChatSettings(
        template=template.source,
        template_variables=dict(template.variables),
        learn=config.learn or "all",
        max_tokens=NPY_ROW_TOKENS if is_npy and config.max_tokens is None else config.max_tokens,
        too_long=config.too_long or "cut",
        pad_id=pad_id if is_npy else None,
    )


def _find_finished(job: Job) -> Manifest | None:
    """Return the manifest of a finished output of the same preparation, or None if there is no manifest.

    Raises InputError if the output has other inputs or settings, lacks files, or left out lines that `strict` refuses.
    """
    prefix, manifest = job.output, read_manifest(job.output)
    if manifest is None:
        return None
    remedy = "choose another output prefix, or remove its files"
    sizes = {Path(prefix).parent / record.path: record.bytes for record in manifest.outputs[0].files.values()}
    if not all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()):
        raise InputError(f"{prefix}.manifest.json exists, but not all files that it lists; {remedy}")
    difference = difference_of(job.assignment, manifest)
    has_same_inputs = len(job.files) == len(manifest.inputs) and all(map(is_unchanged, job.files, manifest.inputs))
    if not difference and not has_same_inputs:
        difference = f"other inputs ({plural(len(manifest.inputs), 'file')}, {manifest.inputs[0].path} first)"
    if difference:
        raise InputError(f"output prefix {prefix} already exists with {difference}; {remedy}")
    if job.strict and manifest.refused:
        raise InputError(f"{manifest.refused_examples[0]}, and the prefix {prefix} already exists without it; {remedy}")
    if folder_path(prefix).exists():  # left by a run that was killed just before the removal of its work folder
        with work_folder(prefix) as work:
            work.clear()
    return manifest


# -- hold out


def prepare_both(config: PrepareConfig, parts: int) -> None:
    """Divide the input files into `parts` shares; prepare the last to PREFIX-validation, all others to PREFIX.

    PREFIX is written last, so that PREFIX-validation is complete if PREFIX exists.

    Raises FanformerError if there are fewer files than parts, or if one of the two cannot be prepared.
    """
    if parts < 2:
        raise InputError(f"--hold-out is {parts}; it must be at least 2, a part for validation and one for training")
    check_output(config.output)
    files = input_files(config)
    if len(files) < parts:
        raise InputError(
            f"--hold-out is {parts}, more than the files given ({len(files)}), which are not cut; give more files"
            " (split -n l/20 FILE cuts one), a smaller number, or leave it out and set data.split for the run"
        )
    held_out = set(last_share(files, parts))
    both = [
        ("validation", f"{config.output}-validation", [file for file in files if file in held_out]),
        ("training", config.output, [file for file in files if file not in held_out]),
    ]
    # But an output that exists comes first: if it has other inputs, it is refused before the other one is written.
    both.sort(key=lambda share: read_manifest(share[1]) is not None or folder_path(share[1]).exists(), reverse=True)
    for name, output, part_files in both:
        show([f"{name}: {len(part_files):,} of {plural(len(files), 'file')}, to {output}"])
        with _progress(name) as listener:
            report = prepare(replace(config, output=output), listener, files=part_files)
        show(f"{name}: {line}" for line in report.lines())


def last_share(files: Sequence[InputFile], parts: int) -> list[InputFile]:
    """Return the last of `parts` shares of the files; all shares hold about as many bytes of text.

    Files are dealt out from the largest to the smallest (equal ones by path), each to the share with the fewest bytes
    so far (of equal ones, with the fewest files, then the first): the same files always give the same shares.
    """

    def text_bytes(file: InputFile) -> float:
        return file.stat().st_size * (COMPRESSED_WEIGHT if file.suffix in COMPRESSIONS else 1.0)

    share_bytes, shares = [0.0] * parts, [list[InputFile]() for _ in range(parts)]
    for file in sorted(files, key=lambda file: (-text_bytes(file), recorded_path(file))):
        smallest = min(range(parts), key=lambda number: (share_bytes[number], len(shares[number]), number))
        shares[smallest].append(file)
        share_bytes[smallest] += text_bytes(file)
    return shares[-1]
