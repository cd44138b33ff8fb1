"""Check a preparation's options, look for its result, and have `pipeline` turn its inputs into token files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron_fanformer.data.chat_template import RenderedChat, encode_chat, find_template, refuse_spaces_between
from megatron_fanformer.data.chats import NPY_ROW_TOKENS
from megatron_fanformer.data.manifest import ChatSettings, Encoding, Manifest, Settings, TokenizerRecord, read_manifest
from megatron_fanformer.data.token_files import NPY_SUFFIX, token_dtype
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer, note_of_end
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.documents import DocumentParser
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
from megatron_fanformer.prepare.outputs import check_output, is_whole
from megatron_fanformer.prepare.pipeline import Job, ProgressListener, encode_shard, merge, run, shard_prefix
from megatron_fanformer.prepare.shards import difference_of, folder_path, is_unchanged, work_folder
from megatron_fanformer.prepare.verb import PrepareConfig, Shard
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime.device import quieten_libraries
from megatron_fanformer.terminal import phases, plural, show

ALREADY_THERE = "{} already exists, made from the same input with the same settings"
COMPRESSED_WEIGHT = 2.5
"""Bytes of text in a byte of a compressed file: 2.3 to 2.9 of Dolma's sample documents and this project's pages."""
# Pieces that pad the rows of chats, the most likely first; without one, the end of text does.
PADDING_NAMES = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """The result of `prepare`, which may have been there before."""

    prefix: str
    already_there: bool
    """Whether the same preparation had been done before, and nothing was written."""
    manifest: Manifest
    notes: Sequence[str] = ()
    """Further lines."""

    def lines(self) -> list[str]:
        """Describe what was done."""
        manifest = self.manifest
        lines = [ALREADY_THERE.format(self.prefix)] if self.already_there else []
        counts = f"{plural(manifest.documents, 'document')}, {plural(manifest.tokens, 'token')}"
        if (chat := manifest.settings.chat) is not None:
            learned = sum(output.learned_tokens or 0 for output in manifest.outputs)
            padded = "" if chat.pad_id is None else " with padding"
            counts = f"{plural(manifest.documents, 'conversation')}, {manifest.tokens:,} tokens{padded}"
            counts += f", {learned:,} of them learned"
        lines.append(f"{plural(manifest.lines_read, 'line')} read: {counts}")
        if chat is not None and (cut := sum(output.cut or 0 for output in manifest.outputs)):
            lines.append(f"{plural(cut, 'conversation')} cut to {chat.max_tokens:,} tokens")
        lines += [f"{plural(number, 'line')} refused: {reason}" for reason, number in manifest.refused.items()]
        lines += [f"  {example}" for example in manifest.refused_examples]
        if manifest.encoding.reason not in (None, SMALL_INPUT):  # why the fastest library was not used
            lines.append(f"ids by {manifest.encoding.backend}: {manifest.encoding.reason}")
        return [*lines, *self.notes]


def prepare_files(config: PrepareConfig) -> None:
    """Run `prepare`, a shard of it, or that of both prefixes."""
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
    with phases(title) as report:
        yield lambda documents, share: report(title, f"{plural(documents, 'document')}, {share:.0%} of the input")


def prepare(
    config: PrepareConfig, progress: ProgressListener | None = None, *, files: list[InputFile] | None = None
) -> PrepareReport:
    """Tokenize all documents or conversations of the inputs into token files, their ledger and their manifest.

    Each document becomes one sequence, ended by the end-of-text id, in the order of the inputs (sorted) and of
    their lines. If the same preparation is already complete, nothing is done; if it was interrupted, it continues, to
    the same bytes. `files` are some files of `input_files`, in that order, for a preparation of these alone.

    Raises:
        InputError: missing or unusable input, tokenizer or output; an output prefix that exists with other
            settings; no document at all; under `strict`, a refused line.
        CorruptError: truncated or damaged input files; the others are still encoded, and kept.
        FanformerError: worker processes died twice on a file, or the disk is full.
    """
    job, tokenizer = _job(config, files)
    notes = note_of_end(tokenizer)
    if (existing := _existing(job)) is not None:
        return PrepareReport(prefix=config.output, already_there=True, manifest=existing, notes=notes)
    if config.merge is not None:
        manifest = merge(job, config.merge)
    else:
        manifest = run(_with_encoder(job, config, tokenizer), progress)
    return PrepareReport(prefix=config.output, already_there=False, manifest=manifest, notes=notes)


def prepare_shard(config: PrepareConfig, shard: Shard, progress: ProgressListener | None = None) -> list[str]:
    """Encode one of the shards that `prepare` merges; returns lines for the user. Raises as `prepare`."""
    job, tokenizer = _job(config, None)
    if _existing(job) is not None:
        return [ALREADY_THERE.format(config.output)]
    records = encode_shard(_with_encoder(job, config, tokenizer), shard, progress)
    documents, tokens = (sum(getattr(record, name) for record in records) for name in ("documents", "tokens"))
    counts = f"{plural(len(records), 'file')}, {plural(documents, 'document')}, {plural(tokens, 'token')}"
    place = folder_path(shard_prefix(config.output, shard))
    return [f"shard {shard}: {counts}, in {place}; when all are done, --merge {shard.count} joins them"]


def _job(config: PrepareConfig, files: list[InputFile] | None) -> tuple[Job, Tokenizer]:
    """Check the options; return the preparation and its tokenizer."""
    _check(config)
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
        # Where nothing is encoded, in a merge or from token files.
        encoder=EncoderChoice(str(tokenizer.path), tokenizer.eod_id, Encoding(backend="none")),
        workers=config.workers,
        strict=config.strict,
    )
    return job, tokenizer


def _with_encoder(job: Job, config: PrepareConfig, tokenizer: Tokenizer) -> Job:
    if config.from_npy:
        return job
    input_bytes = sum(file.stat().st_size for file in job.files)
    return replace(job, encoder=choose_encoder(tokenizer, config.backend, input_bytes))


def input_files(config: PrepareConfig) -> list[InputFile]:
    """Return the files that the inputs name, of the kind that is read. Raises InputError as `expand_inputs`."""
    suffixes = (NPY_SUFFIX,) if config.from_npy else CHAT_SUFFIXES if config.chat else DOCUMENT_SUFFIXES
    files = expand_inputs(config.inputs, suffixes)
    if config.from_npy and (remote := next((file for file in files if isinstance(file, RemoteInput)), None)):
        raise InputError(f"{remote} is on another store, from which from_npy does not read; copy it to this machine")
    return files


def _check(config: PrepareConfig) -> None:
    check_output(config.output)
    for name, least in (("workers", 1), ("max_tokens", 2)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")
    if config.too_long == "drop" and config.max_tokens is None and config.format != "npy":
        raise InputError("too_long is 'drop', but no conversation is too long without max_tokens; set it")
    DocumentParser(config.text_field)  # refuses an impossible name before any worker does


def _settings(config: PrepareConfig, tokenizer: Tokenizer) -> Settings:
    dtype = token_dtype(tokenizer.vocab_size)
    if config.format == "npy":
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    return Settings(
        text_field="" if config.chat else config.text_field,
        dtype=dtype,
        format=config.format,
        npy_dtype=config.npy_dtype if config.from_npy else None,
        chat=_chat_settings(config, tokenizer) if config.chat else None,
    )


def _chat_settings(config: PrepareConfig, tokenizer: Tokenizer) -> ChatSettings:
    refuse_spaces_between(tokenizer)
    template = find_template(config.tokenizer, config.chat_template, eod_id=config.eod_id)
    is_npy = config.format == "npy"
    special = set(tokenizer.special_pieces)
    padding = next((name for name in PADDING_NAMES if name in special), None)
    pad_id = tokenizer.eod_id
    if padding is not None:
        pad_id = int(encode_chat(tokenizer, RenderedChat(padding, []))[0][0])
    return ChatSettings(
        template=template.source,
        template_variables=dict(template.variables),
        learn=config.learn or "all",
        max_tokens=NPY_ROW_TOKENS if is_npy and config.max_tokens is None else config.max_tokens,
        too_long=config.too_long or "cut",
        pad_id=pad_id if is_npy else None,
    )


def _existing(job: Job) -> Manifest | None:
    """Return the manifest of the same preparation, already complete; None where the prefix is free or unfinished."""
    prefix = job.output
    if (manifest := read_manifest(prefix)) is None:
        return None
    remedy = "choose another output prefix, or remove its files"
    if not is_whole(prefix, manifest):
        raise InputError(f"{prefix}.manifest.json exists, but not all files that it lists; {remedy}")
    difference = difference_of(job.assignment, manifest)
    same_inputs = len(job.files) == len(manifest.inputs) and all(map(is_unchanged, job.files, manifest.inputs))
    if not difference and not same_inputs:
        difference = f"other inputs ({plural(len(manifest.inputs), 'file')}, {manifest.inputs[0].path} first)"
    if difference:
        raise InputError(f"output prefix {prefix} already exists with {difference}; {remedy}")
    if job.strict and manifest.refused:
        raise InputError(f"{manifest.refused_examples[0]}, and the prefix {prefix} already exists without it; {remedy}")
    if folder_path(prefix).exists():  # a run that was killed after its very last step
        with work_folder(prefix) as work:
            work.end()
    return manifest


# -- hold out


def prepare_both(config: PrepareConfig, parts: int) -> None:
    """Prepare the last of `parts` shares of the inputs, and then the others, each as a preparation by itself.

    Training comes last, so that validation is complete where PREFIX is. Raises InputError where there are fewer files
    than parts, and as `prepare`.
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
    held = set(last_share(files, parts))
    both = [
        ("validation", f"{config.output}-validation", [file for file in files if file in held]),
        ("training", config.output, [file for file in files if file not in held]),
    ]
    # An output that stands comes first: if it is of other inputs, it is refused before anything is written beside it.
    both.sort(key=lambda share: read_manifest(share[1]) is None and not folder_path(share[1]).exists())
    for name, output, share in both:
        show([f"{name}: {len(share):,} of {plural(len(files), 'file')}, to {output}"])
        with _progress(name) as listener:
            report = prepare(replace(config, output=output), listener, files=share)
        show(f"{name}: {line}" for line in report.lines())


def last_share(files: Sequence[InputFile], parts: int) -> list[InputFile]:
    """Return the last of `parts` shares of files, about equal by bytes of text.

    The largest file goes first, each to the share that has the fewest bytes yet; of equal ones the order of paths and
    of shares decides, so that the same files give the same shares.
    """
    weights, shares = [0.0] * parts, [list[InputFile]() for _ in range(parts)]
    weighed: list[tuple[float, str, InputFile]] = []
    for file in files:
        path = recorded_path(file)
        weight = file.stat().st_size * (COMPRESSED_WEIGHT if path.endswith(tuple(COMPRESSIONS)) else 1.0)
        weighed.append((-weight, path, file))
    for minus_weight, _, file in sorted(weighed, key=lambda entry: entry[:2]):
        place = min(range(parts), key=lambda place: (weights[place], len(shares[place]), place))
        shares[place].append(file)
        weights[place] -= minus_weight
    return shares[-1]
