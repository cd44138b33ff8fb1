"""What `generate` and `chat` take on the command line; imports nothing that is slow."""

import argparse
from pathlib import Path


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    _checkpoint(parser)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='texts to continue: a line each, or JSON lines with "prompt"'
    )
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt (1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="at most this many (64)")
    _sampling(parser)
    parser.add_argument("--batch-size", type=int, default=16, help="texts decoded together, which changes none (16)")
    parser.add_argument("--tokenizer", help="instead of the checkpoint's own")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line for each text")


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """The options of `chat`."""
    _checkpoint(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template, or olmo: the authors' form (the checkpoint's own)"
    )
    parser.add_argument("--max-new-tokens", type=int, help="of an answer, at most (what the model's context holds)")
    _sampling(parser)
    parser.add_argument("--tokenizer", help="instead of the checkpoint's own")
    parser.epilog = (
        "At the prompt, /reset begins anew, and /quit or Ctrl-D ends; Ctrl-C ends an answer, twice the program. From a "
        "pipe, each line is a message, and the answers alone are printed."
    )


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a run's folder, one checkpoint, the URL of one, or an exported Hugging Face folder"
    )


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (0)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: all (0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens with this total probability (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
