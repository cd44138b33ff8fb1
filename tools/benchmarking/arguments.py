"""Reads the arguments of benchmarks."""

import argparse


def count(text: str) -> int:
    """A number of rounds, steps, tokens and the like."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)
