"""Scores the step time by formula against published runs.

    python tools/score_published.py tests/planning/published_runs.csv                    # the committed constants
    python tools/score_published.py ROWS.csv --fit-on tests/planning/published_runs.csv  # constants fitted to others
    python tools/score_published.py tests/planning/published_runs.csv --leave-one-out    # each source without its own

The columns of a file are those of tests/planning/published_runs.csv (tools/published/rows.py says what each is). Times
are compared, never FLOP/s, which are counted by several conventions.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from published.fit import PRIORS, constant_utilization, fit
from published.rows import Row, read_rows

from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.planning.machines import Machine, known_machines


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


def main() -> int:
    """Print a line a run, and mean and worst error of each source."""
    options = _options()
    try:
        rows = read_rows(options.rows)
        fitted_on = read_rows(options.fit_on) if options.fit_on else None
        scores, machines = _scores(rows, fitted_on, leave_one_out=options.leave_one_out)
    except FanformerError as error:
        print(f"score_published: {error}", file=sys.stderr)
        return error.exit_code
    report = {
        "runs": [_run_line(score) for score in scores],
        "sources": {source: _summary(own) for source, own in _by_source(scores)},
        "all": _summary(scores),
        "constants": {name: dataclasses.asdict(machine) for name, machine in machines.items()},
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
        if fitted_on:
            _print_constants(machines)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, metavar="ROWS.csv", help="published runs")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fit-on", type=Path, metavar="OTHER.csv", help="fit the constants to these runs first")
    how.add_argument(
        "--leave-one-out", action="store_true", help="score each source with constants fitted to the others"
    )
    parser.add_argument("--json", action="store_true", help="print one object, with the constants used")
    return parser.parse_args()


def _scores(
    rows: list[Row], fitted_on: list[Row] | None, *, leave_one_out: bool
) -> tuple[list[Score], dict[str, Machine]]:
    """The scores, and the machines with which they were made (the committed ones, with one source left out in turn)."""
    if not leave_one_out:
        machines = fit(fitted_on) if fitted_on else known_machines()
        return [
            Score(row, row.predict(machines[row.gpu]), constant_utilization(fitted_on or rows, row)) for row in rows
        ], machines
    scores = []
    for source in dict.fromkeys(row.source for row in rows):
        others = [row for row in rows if row.source != source]
        if not others:
            raise InputError(f"all runs are of {source}; to leave it out, another source is needed")
        machines = fit(others)
        scores += [
            Score(row, row.predict(machines[row.gpu]), constant_utilization(others, row))
            for row in rows
            if row.source == source
        ]
    return scores, known_machines()


def _by_source(scores: Iterable[Score]) -> list[tuple[str, list[Score]]]:
    scores = list(scores)
    sources = dict.fromkeys(score.row.source for score in scores)
    return [(source, [score for score in scores if score.row.source == source]) for source in sources]


def _run_line(score: Score) -> dict[str, object]:
    return {
        "source": score.row.source,
        "name": score.row.name,
        "gpu": score.row.gpu,
        "measured_seconds": score.row.step_seconds,
        "predicted_seconds": score.predicted,
        "error": score.error,
        "error_of_constant_utilization": score.constant_error,
    }


def _summary(scores: Sequence[Score]) -> dict[str, float]:
    return {
        "runs": len(scores),
        "mean_error": statistics.mean(abs(score.error) for score in scores),
        "worst_error": max((score.error for score in scores), key=abs),
        "mean_error_of_constant_utilization": statistics.mean(abs(score.constant_error) for score in scores),
    }


def _print(report: dict) -> None:
    print(f"{'source':16} {'run':38} {'gpu':5} {'measured s':>10} {'predicted s':>11} {'error':>7}")
    for line in report["runs"]:
        print(
            f"{line['source']:16.16} {line['name']:38.38} {line['gpu']:5} {line['measured_seconds']:10.3f} "
            f"{line['predicted_seconds']:11.3f} {line['error']:+7.1%}"
        )
    print(f"\n{'source':16} {'runs':>5} {'mean error':>11} {'worst':>7} {'constant share of the peak, mean error':>40}")
    for source, line in {**report["sources"], "all": report["all"]}.items():
        print(
            f"{source:16.16} {line['runs']:5} {line['mean_error']:11.1%} {line['worst_error']:+7.1%} "
            f"{line['mean_error_of_constant_utilization']:40.1%}"
        )


def _print_constants(machines: dict[str, Machine]) -> None:
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
