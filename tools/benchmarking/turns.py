"""What benchmarks of single layers share: options by the fields of a dataclass, the clock of a turn, and the output."""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple


class Clocked(NamedTuple):
    """What a turn took."""

    seconds: float
    processor_seconds: float
    """Of all threads; on a GPU the host's."""


def clocked(turn: Callable[[], object], wait: Callable[[], object] = lambda: None) -> Clocked:
    """Take a turn.

    Args:
        wait: until the device has done it.
    """
    started, processor_started = time.perf_counter(), time.process_time()
    turn()
    wait()
    return Clocked(time.perf_counter() - started, time.process_time() - processor_started)


def parser_of(description: str, defaults: Any) -> argparse.ArgumentParser:
    """A parser with an option for each field of a dataclass, and `--json`."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", action="store_true", help="an object a line, with what was asked")
    return parser


def print_results(
    results: Iterable[Any], asked: Any, *, heading: str, line: Callable[[Any], str], as_json: bool
) -> None:
    """Print results as they come, as a table or as objects."""
    if not as_json:
        print(f"{asked}\n{heading}")
    for result in results:
        print(json.dumps({**asdict(result), **asdict(asked)}) if as_json else line(result), flush=True)
