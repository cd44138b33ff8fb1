"""`megatron-fanformer prepare`, under the option names of Megatron's preprocess_data.py."""

import argparse
import sys
from collections.abc import Sequence

from megatron_fanformer.cli import main as run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate the options and run `prepare`; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="document files and folders of them")
    parser.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--tokenizer-model",
        "--tokenizer",
        dest="tokenizer",
        required=True,
        help="a sentencepiece .model, a Hugging Face tokenizer.json, or a folder that holds one",
    )
    parser.add_argument("--workers", type=int, help="worker processes (default: all cores)")
    parser.add_argument("--json-keys", nargs=1, default=["text"], help="the field that holds the text")
    options = parser.parse_args(arguments)
    command = ["prepare", *options.input, "--output", options.output_prefix]
    command += ["--tokenizer", options.tokenizer, "--text-field", options.json_keys[0]]
    if options.workers is not None:
        command += ["--workers", str(options.workers)]
    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
