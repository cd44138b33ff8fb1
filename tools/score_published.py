"""Scores the step time by formula against published runs.

    python tools/score_published.py tests/planning/published_runs.csv                    # the committed constants
    python tools/score_published.py ROWS.csv --json scores.json                          # and write them
    python tools/score_published.py ROWS.csv --fit-on tests/planning/published_runs.csv  # constants fitted to others
    python tools/score_published.py tests/planning/published_runs.csv --leave-one-out    # each source without its own

The columns of a file are those of tests/planning/published_runs.csv (tools/published/rows.py says what each is, and
tools/published/software.py what stands for one that is missing or empty). Times are compared, never FLOP/s, which are
counted by several conventions.

Runs of one trainer, in whichever release, are no witnesses of each other: they are left out together.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from published.fit import ARCHITECTURES, PRIORS, constant_utilization, fit, leave_one_out
from published.rows import Row, read_rows

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.planning.machines import Machine, known_machines

STATED = 0.9
"""Share of the runs that an interval is to hold."""


class Score(NamedTuple):
    """A run, measured and predicted."""

    row: Row
    predicted: float
    """Seconds."""
    at_constant_utilization: float
    """Seconds, if every run of its chip and format reached the same share of the peak."""

    @property
    def error(self) -> float:
        """Relative, of the prediction."""
        return self.predicted / self.row.step_seconds - 1

    @property
    def constant_error(self) -> float:
        """Relative, of the constant share's."""
        return self.at_constant_utilization / self.row.step_seconds - 1

    @property
    def kind(self) -> str:
        """Architecture and number format, of which an interval is stated."""
        return f"{ARCHITECTURES[self.row.gpu]}, {self.row.format[1]}"


def main() -> int:
    """Print a line a run, mean and worst error of each source, and how many runs each interval holds."""
    options = _options()
    try:
        if found := file_problems(json=options.json):
            raise InputError("\n".join(found))
        rows = read_rows(options.rows)
        fitted_on = read_rows(options.fit_on) if options.fit_on else None
        scores, machines = _scores(rows, fitted_on, is_left_out=options.leave_one_out)
    except FanformerError as error:
        print(f"score_published: {error}", file=sys.stderr)
        return error.exit_code
    report = {
        "rows": [_run_line(score) for score in scores],
        "sources": {source: _summary(own) for source, own in _grouped(scores, lambda score: score.row.source)},
        "all": _summary(scores),
        "intervals": {kind: _interval(own) for kind, own in _grouped(scores, lambda score: score.kind)},
        "constants": {name: dataclasses.asdict(machine) for name, machine in machines.items()},
    }
    _print(report)
    if fitted_on:
        _print_constants(machines)
    if options.json:
        write_atomically(options.json, json.dumps(report, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, metavar="ROWS.csv", help="published runs")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fit-on", type=Path, metavar="OTHER.csv", help="fit the constants to these runs first")
    how.add_argument(
        "--leave-one-out", action="store_true", help="score each source with constants fitted to the others"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write rows, errors and the constants used")
    return parser.parse_args()


def _scores(
    rows: list[Row], fitted_on: list[Row] | None, *, is_left_out: bool
) -> tuple[list[Score], Mapping[str, Machine]]:
    """The scores, and the machines with which they were made (the committed ones, with one source left out in turn)."""
    if not is_left_out:
        machines = fit(fitted_on) if fitted_on else known_machines()
        known = fitted_on or rows
        return [Score(row, row.predict(machines[row.gpu]), constant_utilization(known, row)) for row in rows], machines
    of_family = leave_one_out(rows)
    others = {family: [row for row in rows if row.family != family] for family in of_family}
    return [
        Score(row, row.predict(of_family[row.family][row.gpu]), constant_utilization(others[row.family], row))
        for row in rows
    ], known_machines()


def _grouped(scores: Iterable[Score], key: Any) -> list[tuple[str, list[Score]]]:
    groups: dict[str, list[Score]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return list(groups.items())


def _run_line(score: Score) -> dict[str, Any]:
    row = score.row
    return {
        "src": row.source,
        "name": row.name,
        "gpu": row.gpu.upper(),
        "prec": row.precision,
        "error": score.error,
        "measured_seconds": row.step_seconds,
        "predicted_seconds": score.predicted,
        "error_of_constant_utilization": score.constant_error,
    }


def _summary(scores: Sequence[Score]) -> dict[str, float]:
    return {
        "runs": len(scores),
        "mean_error": statistics.mean(abs(score.error) for score in scores),
        "worst_error": max((score.error for score in scores), key=abs),
        "mean_error_of_constant_utilization": statistics.mean(abs(score.constant_error) for score in scores),
    }


def _interval(scores: Sequence[Score]) -> dict[str, Any]:
    """How many of the runs are within the interval that `plan` prints, and within one that did not know their source.

    An interval holds nine of ten runs of each source that it knows.
    """
    families = dict(_grouped(scores, lambda score: score.row.family))
    widths = {family: _width(own) for family, own in families.items()}
    held = [
        abs(score.error) <= max(width for other, width in widths.items() if other != family)
        for family, own in families.items()
        for score in own
        if len(families) > 1
    ]
    stated = {known_machines()[score.row.gpu].error_in(score.row.format[1]) for score in scores}
    return {
        "runs": len(scores),
        "sources": len(families),
        "mean_error": statistics.mean(abs(score.error) for score in scores),
        "worst_error": max((score.error for score in scores), key=abs),
        "width": max(widths.values()),
        "stated": max(stated),
        "within_stated": sum(abs(score.error) <= min(stated) for score in scores) / len(scores),
        "within_others": statistics.mean(held) if held else None,
    }


def _width(scores: Sequence[Score]) -> float:
    """The error that nine of ten runs do not exceed."""
    return sorted(abs(score.error) for score in scores)[math.ceil(STATED * len(scores)) - 1]


def _print(report: dict) -> None:
    print(f"{'source':16} {'run':38} {'gpu':5} {'format':6} {'measured s':>10} {'predicted s':>11} {'error':>7}")
    for line in report["rows"]:
        print(
            f"{line['src']:16.16} {line['name']:38.38} {line['gpu']:5} {line['prec']:6} "
            f"{line['measured_seconds']:10.3f} {line['predicted_seconds']:11.3f} {line['error']:+7.1%}"
        )
    print(f"\n{'source':16} {'runs':>5} {'mean error':>11} {'worst':>7} {'constant share of the peak, mean error':>40}")
    for source, line in {**report["sources"], "all": report["all"]}.items():
        print(
            f"{source:16.16} {line['runs']:5} {line['mean_error']:11.1%} {line['worst_error']:+7.1%} "
            f"{line['mean_error_of_constant_utilization']:40.1%}"
        )
    print(
        f"\n{'chips, format':20} {'runs':>5} {'mean error':>11} {'worst':>7} {'nine of ten':>12} {'stated':>7} ", end=""
    )
    print(f"{'within it':>10} {'within that of the other sources':>33}")
    for kind, line in report["intervals"].items():
        others = "-" if line["within_others"] is None else f"{line['within_others']:.0%}"
        print(
            f"{kind:20} {line['runs']:5} {line['mean_error']:11.1%} {line['worst_error']:+7.1%} "
            f"{line['width']:12.1%} {line['stated']:7.0%} {line['within_stated']:10.0%} {others:>33}"
        )


def _print_constants(machines: Mapping[str, Machine]) -> None:
    """For machines.yaml."""
    for name in PRIORS:
        print(f"\n{name}:")
        for field, value in dataclasses.asdict(machines[name]).items():
            if isinstance(value, dict):
                print(f"  {field}: efficiency {value['efficiency']:.3g}")
            elif isinstance(value, float):
                print(f"  {field}: {value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
