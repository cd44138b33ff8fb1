"""The verb `prepare`, and its options; imports nothing that is slow."""

import argparse
from dataclasses import dataclass, field
from typing import Literal

from megatron_fanformer.data.manifest import Format, Learn, TooLong
from megatron_fanformer.options import Verb, argument, option
from megatron_fanformer.processes import usable_cores

MANY, KIND = "many machines", "kinds of inputs"
Backend = Literal["auto", "gigatoken", "tokenizers", "sentencepiece"]


@dataclass(frozen=True)
class Shard:
    """One of `count` shares of the input files: every `count`-th file, beginning with file `number` (from 0)."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def _parse_shard(text: str) -> Shard:
    """Parse I/N. Raises ArgumentTypeError if the text has another form, or I is not below N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, with I from 0 to N - 1, such as 0/16")
    return Shard(int(number), int(count))


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Options of `prepare`."""

    inputs: tuple[str, ...] = argument((), metavar="INPUT")
    """Files (.jsonl, .json, .ndjson, .txt, .md, or .gz, .zst; .parquet), folders, patterns, URLs, @LIST."""
    output: str = option(metavar="PREFIX")
    """Prefix of the token files: PREFIX.bin, PREFIX.idx, PREFIX.ledger.parquet, PREFIX.manifest.json."""
    hold_out: int | None = option(None, metavar="N", exclusive=MANY)
    """Share the files in N parts, which are not cut: the last goes to PREFIX-validation, all others to PREFIX."""
    tokenizer: str
    """A sentencepiece .model, a Hugging Face tokenizer.json, or a folder that holds one."""
    workers: int = field(default_factory=usable_cores)
    """Worker processes, at least 1; they do not change the output (default: one for each core)"""
    text_field: str = "text"
    """The field (the column) of a document that is its text."""
    eod_id: int | None = None
    """The id that ends a document (default: the tokenizer's end of text)"""
    format: Format = "megatron"
    """megatron: .bin and .idx; npy: the headerless .npy files of the reference."""
    backend: Backend = option("auto", metavar="BACKEND")
    """Library that computes the ids: auto, gigatoken, tokenizers, sentencepiece; all give the same ids."""
    from_npy: bool = option(False, exclusive=KIND)
    """The inputs are headerless .npy token files, made by the same tokenizer."""
    npy_dtype: Literal["uint16", "uint32"] = option("uint16", needs=("from_npy",))
    """With --from-npy: the type of the tokens in them."""
    strict: bool = False
    """Stop at the first line or text file that is not a document, instead of counting it."""
    chat: bool = option(False, exclusive=KIND)
    """The inputs are conversations; writes PREFIX.mask.bin, too (docs/fine-tuning.md)"""
    chat_template: str | None = option(None, metavar="FILE", needs=("chat",))
    """With --chat: a Jinja file, or olmo, the form of the paper's data (default: the tokenizer's own)"""
    learn: Learn | None = option(None, needs=("chat",))
    """With --chat: which of the assistant's turns are learned (default: all)"""
    max_tokens: int | None = option(None, metavar="N", needs=("chat",))
    """With --chat: the most tokens of a conversation, with npy those of each row (default: any; 2048 with npy)"""
    too_long: TooLong | None = option(None, needs=("chat",))
    """With --chat: cut or drop a conversation of more tokens (default: cut)"""
    shard: Shard | None = option(None, metavar="I/N", parse=_parse_shard, exclusive=MANY)
    """Encode every N-th file, from number I (from 0) on, for a later --merge of all N shards."""
    merge: int | None = option(None, metavar="N", exclusive=MANY)
    """Join N shards of the same inputs and options, to the same bytes as one machine's run."""


REMOVED = {
    **dict.fromkeys(
        ("--lists", "--from-lists", "--task"),
        "prepare --shard I/N, once for each I from 0 to N - 1, shares the files; --merge N joins the result",
    ),
    "--part-size": "prepare parts of the files to prefixes of their own, and name them all in data.train_data",
    "--scratch": "prepare to a path, and copy its files to the store",
    **dict.fromkeys(("--min-length", "--max-length", "--source"), "filter the documents before, as with Dolma's mixer"),
    "--no-ledger": "the ledger is always written",
    "--status": "prepare --merge N names the shards that are not done",
}
"""Options that were removed, and the remedy for each."""


PREPARE = Verb(
    name="prepare",
    help="Turn documents or conversations into token files.",
    options=PrepareConfig,
    run="megatron_fanformer.prepare.prepare:prepare_files",
    examples=(
        "prepare documents/*.jsonl.gz --output tokens/web\n--tokenizer tokenizer.json",
        "prepare @files.txt --output tokens/books\n--tokenizer tokenizer.model --workers 8",
    ),
    removed=REMOVED,
)
