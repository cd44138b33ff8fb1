"""The options of `plan`, and the numbers in them. Imports nothing that takes time: every command's parser reads it."""

import argparse
import math
from decimal import Decimal

ALL_STAGES = "all-stages"
MOST_TOKENS = 10**18
FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `plan` takes beside a configuration."""
    add = parser.add_argument
    add("--gpus", type=_count, required=True, metavar="N", help="GPUs of the whole run")
    add("--gpu", required=True, metavar="NAME", help="a100, h100, h200, b200, or a file with a machine's figures")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--layouts",
        nargs="+",
        default=(),
        metavar="LAYOUT",
        help='such as tp=8,pp=4 or "cp=2,mbs=1,recompute=full", over the configuration\'s own',
    )
    asked.add_argument("--search", action="store_true", help="find the fastest of all layouts that are legal and fit")
    add(
        "--simulate",
        nargs="+",
        type=_rank,
        default=(),
        metavar="RANK",
        help=f"run a step of these ranks under fake tensors; {ALL_STAGES}: of one a pipeline stage",
    )
    add("--tokens", type=tokens, help="to train on, e.g. 1T, 300B, 15M (those of the configuration's steps)")
    add("--price", type=_price, metavar="P", help="of a GPU hour, in any currency")
    add("--report", metavar="FILE.json", help="write everything as JSON, and a picture beside it as PNG")


def tokens(text: str) -> int:
    """A number of tokens: 1T, 1.05T, 300B, 15M or all digits."""
    factor = FACTORS.get(text[-1:].upper(), 1)
    try:
        number = Decimal(text[:-1] if factor > 1 else text) * factor
    except ArithmeticError:  # no number, or beyond any exponent
        number = Decimal(0)
    if not number.is_finite() or not 1 <= number <= MOST_TOKENS or number != number.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from 1 to 1000000T; write it as in 1T, 300B or 15M"
        )
    return int(number)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; it must be an integer from 1 to 10000000")
    return int(text)


def _rank(text: str) -> int | str:
    if text != ALL_STAGES and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; name ranks by their numbers, or {ALL_STAGES}")
    return text if text == ALL_STAGES else int(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not (math.isfinite(price) and price >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a price; write a GPU hour's as in 2.5")
    return price
