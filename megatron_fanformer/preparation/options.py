"""What `prepare` takes on the command line; imports nothing that is slow."""

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare`."""
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files (.jsonl, .json, .ndjson, also .gz or .zst; .parquet), folders, glob patterns, @LIST files",
    )
    add(
        "--output",
        required=True,
        metavar="PREFIX",
        help="PREFIX.bin, PREFIX.idx, PREFIX.ledger.parquet, PREFIX.manifest.json",
    )
    add("--tokenizer", required=True, help="sentencepiece .model, Hugging Face tokenizer.json, or a folder")
    add("--workers", type=int, help="worker processes (all cores); they do not change the output")
    add("--text-field", default="text", help="the field (the column) that is a document's text (text)")
    add("--eod-id", type=int, help="the id that ends a document (the tokenizer's end of text)")
    add("--format", default="megatron", help="megatron: .bin and .idx; npy: headerless .npy (megatron)")
    add("--part-size", type=_size, metavar="SIZE", help="parts of about SIZE bytes of tokens, e.g. 500M, 10G (one)")
    add("--min-length", type=int, default=0, metavar="N", help="leave out documents with fewer characters")
    add("--max-length", type=int, metavar="N", help="leave out documents with more characters")
    add("--source", action="append", metavar="NAME", help="keep only this value of the field source; may be repeated")
    add("--no-ledger", action="store_true", help="do not write PREFIX.ledger.parquet")
    add("--backend", default="auto", help="auto, gigatoken, tokenizers, sentencepiece: the ids are the same (auto)")
    add("--from-npy", action="store_true", help="the inputs are headerless .npy token files")
    add("--npy-dtype", default="uint16", help="with --from-npy: the type of the tokens in them (uint16)")
    add("--strict", action="store_true", help="stop at the first line that is not a document")
    add(
        "--chat",
        action="store_true",
        help="the inputs are conversations; writes PREFIX.mask.bin too (docs/fine-tuning.md)",
    )
    add("--chat-template", metavar="FILE", help="with --chat: a Jinja file, or olmo (the tokenizer's own)")
    add("--learn", help="with --chat: the assistant's turns that are learned: all, last (all)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with --chat: the most tokens of a conversation (any; 2048 with npy)",
    )
    add("--too-long", help="with --chat: cut or drop a conversation of more tokens (cut)")


def _size(text: str) -> int:
    """A number of bytes: digits, then K, M, G or T for powers of 1000."""
    factors = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    digits = text[:-1] if text[-1:].upper() in factors else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, such as 500M or 10G")
    return int(digits) * factors.get(text[-1:].upper(), 1)
