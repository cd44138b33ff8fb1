"""The verb `plan`, and its options; imports nothing that is slow."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.options import ANY_FIELD, Verb, count, option


def read_num_gpus(text: str) -> int:
    """Return the number of GPUs that an option states; raise ArgumentTypeError if it states none."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; it must be an integer from 1 to 10000000")
    return int(text)


def _read_positive(text: str) -> float:
    """Return the finite number above 0 that an option states; raise ArgumentTypeError if it states none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan  # which is not above 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, as in 2.5")
    return number


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

    config: Path
    """Configuration file (YAML)."""
    gpus: int = option(metavar="N", parse=read_num_gpus)
    """GPUs of the whole run."""
    gpu: str = option(metavar="NAME")
    """GPU type: a100, h100, h200, b200, gb200, gb300, or a file with a machine's figures."""
    layouts: tuple[str, ...] = option((), metavar="LAYOUT", exclusive="candidates")
    """Layouts to judge, such as tp=8,pp=4 or "cp=2,mbs=1,recompute=full", over the configuration's own."""
    search: bool = option(False, exclusive="candidates")
    """Find the fastest of all layouts that are legal and fit."""
    tokens: int | None = option(None, parse=count)
    """Tokens to train on, e.g. 1T, 300B, 15M (default: those of the configuration's steps)"""
    price: float | None = option(None, metavar="P", parse=_read_positive)
    """Price of a GPU hour, in any currency."""
    report: Path | None = option(None, metavar="FILE.json")
    """Write everything as JSON."""
    overrides: tuple[str, ...] = ()


PLAN = Verb(
    name="plan",
    help="Predict memory, time and cost of a run on many GPUs; find its fastest layout.",
    options=PlanOptions,
    run="megatron_fanformer.plan.command:plan",
    examples=(
        "plan --config examples/fanformer-7b.yaml\n--gpus 256 --gpu h100 --search",
        "plan --config run.yaml --gpus 64 --gpu a100\n--layouts tp=4 tp=2,pp=2",
    ),
    notes=ANY_FIELD,
    removed={
        "--simulate": "tests/plan compares the formulas with the trainer's own code",
        "--write": "copy the layout's lines from the output",
        **dict.fromkeys(("--save-rate", "--failure-hours", "--restart-minutes"), "plan's time is that of steps alone"),
    },
)
