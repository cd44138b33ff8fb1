"""The options of `convert`; imports nothing that is slow."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `convert` takes."""
    parser.add_argument(
        "source",
        help="a checkpoint of ours or its URL, a Hugging Face folder, a checkpoint of the authors or of Megatron-LM",
    )
    parser.add_argument("destination", help="a folder that does not exist yet")
    parser.add_argument(
        "--to",
        required=True,
        choices=("megatron", "hf", "reference"),
        help="a checkpoint of ours, a Hugging Face folder, or a checkpoint in the authors' format",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration with fields of model that a Megatron-LM checkpoint lacks"
    )
    parser.add_argument("--tokenizer", help="tokenizer to put beside the weights, where the source has none")
    parser.add_argument("--eod-id", type=int, help="the id that ends a document (the tokenizer's end of text)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the written weights (the source's own)")
    parser.add_argument(
        "--padded-vocab-size",
        type=int,
        metavar="N",
        help="rows of the embedding (the source's own; for hf the token ids alone)",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a Hugging Face folder (5GB)")
    parser.add_argument("--no-verify", action="store_true", help="publish without checking the result")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the receipt as JSON, with the files' hashes")
