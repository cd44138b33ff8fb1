"""The verb `prepare`, and its options; imports nothing that is slow."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from megatron_fanformer.data.manifest import Format, Learn, TooLong
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import PROGRAM, Verb, argument, count, option, path_or_none
from megatron_fanformer.processes import unwound_by_stop_signals, usable_cores
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import show

MANY = "many machines"
STOPPED = "before the end; what is done is kept, run the same command to continue"
Backend = Literal["auto", "gigatoken", "tokenizers", "sentencepiece"]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Options of `prepare`."""

    inputs: tuple[str, ...] = argument((), metavar="INPUT")
    """Files (.jsonl, .json, .ndjson, .txt, .md, or .gz, .zst, .xz, .bz2; .parquet), folders, patterns, URLs, @LIST."""
    output: str = option("", metavar="PREFIX")
    """Prefix of the token files: PREFIX.bin, PREFIX.idx, PREFIX.ledger.parquet, PREFIX.manifest.json; or its URL."""
    hold_out: int | None = option(None, metavar="N")
    """Share the files in N parts, which are not cut: the last goes to PREFIX-validation, all others to PREFIX."""
    scratch: Path | None = option(None, metavar="FOLDER", parse=path_or_none)
    """With --output at a URL: where they are prepared before they are copied (default: in this user's cache)"""
    tokenizer: str = ""
    """A sentencepiece .model, a Hugging Face tokenizer.json, or a folder that holds one."""
    workers: int = field(default_factory=usable_cores)
    """Worker processes, at least 1; they do not change the output (default: one for each core)"""
    text_field: str = "text"
    """The field (the column) of a document that is its text; a.b: in JSON, the field b of the object a."""
    eod_id: int | None = None
    """The id that ends a document (default: the tokenizer's end of text)"""
    format: Format = "megatron"
    """megatron: .bin and .idx; npy: the headerless .npy files of the reference."""
    part_bytes: int | None = option(None, name="--part-size", metavar="SIZE", parse=count)
    """Publish parts PREFIX-00000, PREFIX-00001, … of about SIZE bytes of tokens, e.g. 500M, 10G (default: one)"""
    min_length: int = option(0, metavar="N")
    """Leave out documents with fewer characters."""
    max_length: int | None = option(None, metavar="N")
    """Leave out documents with more characters."""
    sources: tuple[str, ...] | None = option(None, name="--source", metavar="NAME", repeated=True)
    """Keep only this value of the field `source`; may be repeated."""
    ledger: bool = True
    """Write PREFIX.ledger.parquet, which says where each document came from."""
    backend: Backend = option("auto", metavar="BACKEND")
    """Library that computes the ids: auto, gigatoken, tokenizers, sentencepiece; all give the same ids."""
    from_npy: bool = False
    """The inputs are headerless .npy token files, or datatrove's .ds files, made by the same tokenizer."""
    npy_dtype: Literal["uint16", "uint32"] = "uint16"
    """With --from-npy: the type of the tokens in them."""
    strict: bool = False
    """Stop at the first line or text file that is not a document, instead of counting it."""
    chat: bool = False
    """The inputs are conversations; writes PREFIX.mask.bin, too (docs/fine-tuning.md)"""
    chat_template: str | None = option(None, metavar="FILE")
    """With --chat: a Jinja file, or olmo, the form of the paper's data (default: the tokenizer's own)"""
    learn: Learn | None = None
    """With --chat: which of the assistant's turns are learned (default: all)"""
    max_tokens: int | None = option(None, metavar="N")
    """With --chat: the most tokens of a conversation, with npy those of each row (default: any; 2048 with npy)"""
    too_long: TooLong | None = None
    """With --chat: cut or drop a conversation of more tokens (default: cut)"""
    lists: int | None = option(None, metavar="N", group=MANY)
    """Write N lists of the inputs, about equal in bytes, into the new folder --output, and end."""
    from_lists: Path | None = option(None, metavar="FOLDER", parse=path_or_none, group=MANY)
    """In place of INPUT: prepare each list of FOLDER that no other task has done or is at, to PREFIX-000, …"""
    task: int | None = option(None, metavar="N", group=MANY)
    """With --from-lists: the list to begin with, from 0."""
    status: Path | None = option(None, metavar="FOLDER", parse=path_or_none, group=MANY)
    """Show which lists of FOLDER are done, running, failed or left, and end."""
    json: bool = option(False, group=MANY)
    """With --status: print one JSON object."""
    merge: Path | None = option(None, metavar="FOLDER", parse=path_or_none, group=MANY)
    """Check that all lists of FOLDER are done alike; write PREFIX.manifest.json and PREFIX.blend of the whole."""


MODES: dict[str, tuple[str, ...]] = {
    "lists": ("inputs", "output", "from_npy", "chat"),
    "status": ("json",),
    "merge": (),
}
"""Options that do not prepare, and those that each goes with."""


def _check_options(config: PrepareConfig) -> None:
    """Raise InputError for options that do not go together, or are missing."""
    default = PrepareConfig()
    changed = [each.name for each in fields(config) if getattr(config, each.name) != getattr(default, each.name)]
    mode = next((name for name in MODES if name in changed), None)
    if mode is not None and (stray := [name for name in changed if name not in (mode, *MODES[mode])]):
        raise InputError(f"{stray[0]} is set, which has no effect with --{mode}; leave one of them out")
    if mode is None and config.json:
        raise InputError("json is set, which has no effect without --status; leave it out")
    if config.lists is not None and is_url(config.output):
        raise InputError(f"output {config.output} is on another store, and lists are files of a disk; name a folder")
    if config.scratch is not None and not is_url(config.output):
        raise InputError("scratch is set, which has no effect without --output at a URL; leave it out")
    if config.from_lists is None and config.task is not None:
        raise InputError("task is set, which has no effect without --from-lists; leave it out")
    if config.from_lists is not None and config.hold_out is not None:
        raise InputError("hold_out is set, which has no effect with --from-lists; leave one of them out")
    if config.from_lists is not None and config.inputs:
        raise InputError(f"{config.inputs[0]} is an input beside those of --from-lists; leave one of them out")
    needed = {None: ("output", "tokenizer"), "lists": ("output",)}.get(mode, ())
    if missing := [f"--{name}" for name in needed if not getattr(config, name)]:
        raise InputError(f"{' and '.join(missing)} is missing; {PROGRAM} prepare --help lists the options")


def _prepare(config: PrepareConfig) -> None:
    from megatron_fanformer.runtime.device import quieten_libraries

    _check_options(config)
    quieten_libraries()
    if config.status is not None:
        from megatron_fanformer.preparation.list_status import show_status

        show_status(config.status, as_json=config.json)
    elif config.merge is not None:
        from megatron_fanformer.preparation.list_merge import merge_lists

        merge_lists(config.merge)
    elif config.lists is not None:
        from megatron_fanformer.preparation.lists import write_lists
        from megatron_fanformer.preparation.prepare import input_files

        show([write_lists(input_files(config), config.lists, Path(config.output))])
    elif config.from_lists is not None:
        from megatron_fanformer.preparation.list_tasks import prepare_lists

        with unwound_by_stop_signals(outcome=STOPPED):  # which gives its list back
            prepare_lists(config)
    elif config.hold_out is not None:
        from megatron_fanformer.preparation.hold_out import prepare_both

        with unwound_by_stop_signals(outcome=STOPPED):
            prepare_both(config, config.hold_out)
    else:
        with unwound_by_stop_signals(outcome=STOPPED):
            from megatron_fanformer.preparation.prepare import prepare
            from megatron_fanformer.preparation.progress import progress_line

            with progress_line("preparing") as listener:
                report = prepare(config, listener)
            show(report.lines())


PREPARE = Verb(
    name="prepare",
    help="Turn documents or conversations into token files.",
    options=PrepareConfig,
    run=_prepare,
    examples=(
        "prepare documents/*.jsonl.gz --output tokens/web\n--tokenizer tokenizer.json",
        "prepare @files.txt --output tokens/books\n--tokenizer tokenizer.model --part-size 10G",
    ),
    results_are_files=True,
)
