"""Compare step times by formula with published runs.

    python tools/score_published.py tests/plan/published_runs.csv                    # the committed constants
    python tools/score_published.py ROWS.csv --json scores.json                          # and write them
    python tools/score_published.py ROWS.csv --fit-on tests/plan/published_runs.csv  # constants fitted to others
    python tools/score_published.py tests/plan/published_runs.csv --leave-one-out    # each source without its own

The columns of a file are those of tests/plan/published_runs.csv; tools/published/rows.py describes them, and
tools/published/software.py has the defaults. Times are compared, not FLOP/s, which sources count in different ways.
Runs of one trainer, whatever its release, are not independent, and are left out together. The interval of a chip and
format holds nine of ten runs of each source.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published.fit import ARCHITECTURES, constant_utilization, fit, leave_one_out
from published.rows import Row, read_rows

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.plan.machines import known_machines

STATED = 0.9  # the share of the runs that an interval is to hold
Run = dict[str, Any]


def main() -> int:
    """Print the error of each run, mean and worst error of each source, and the share of runs in each interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.csv", help="published runs")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fit-on", type=Path, metavar="OTHER.csv", help="fit the constants to these runs first")
    how.add_argument("--leave-one-out", action="store_true", help="fit the constants to all other sources")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write runs, errors and the constants")
    options = parser.parse_args()
    try:
        if problems := file_problems(json=options.json):
            raise InputError("\n".join(problems))
        rows = read_rows(options.rows)
        fitted_on = read_rows(options.fit_on) if options.fit_on else None
        machines = fit(fitted_on) if fitted_on else known_machines()
        by_family = leave_one_out(rows) if options.leave_one_out else {}
    except FanformerError as error:
        print(f"score_published: {error}", file=sys.stderr)
        return error.exit_code
    runs = []
    for row in rows:
        others = [other for other in rows if other.family != row.family] if by_family else fitted_on or rows
        seconds = row.predict(by_family.get(row.family, machines)[row.gpu])
        runs.append(_scored(row, seconds, constant_utilization(others, row)))
    report = {
        "rows": runs,
        "sources": {source: _summary(members) for source, members in _grouped(runs, "src").items()},
        "all": _summary(runs),
        "intervals": {kind: _interval(members) for kind, members in _grouped(runs, "kind").items()},
        "constants": {name: dataclasses.asdict(machine) for name, machine in machines.items()},
    }
    _print("run", {f"{run['src']:16} {run['name']:38} {run['kind']}": run for run in runs})
    _print("source", {**report["sources"], "all": report["all"]})
    _print("chips, format", report["intervals"])
    if options.json:
        write_atomically(options.json, json.dumps(report, indent=2) + "\n")
    return 0


def _scored(row: Row, predicted: float, at_constant_utilization: float) -> Run:
    """Return a run with its relative error, and the error if all runs of its kind reached one share of the peak."""
    return {
        "src": row.source,
        "family": row.family,
        "name": row.name,
        "gpu": row.gpu.upper(),
        "prec": row.precision,
        "kind": f"{ARCHITECTURES[row.gpu]}, {row.format[1]}",
        "stated": known_machines()[row.gpu].error_in(row.format[1]),
        "measured_seconds": row.step_seconds,
        "predicted_seconds": predicted,
        "error": predicted / row.step_seconds - 1,
        "error_of_constant_utilization": at_constant_utilization / row.step_seconds - 1,
    }


def _grouped(runs: Sequence[Run], key: str) -> dict[str, list[Run]]:
    return {value: [run for run in runs if run[key] == value] for value in dict.fromkeys(run[key] for run in runs)}


def _summary(runs: Sequence[Run]) -> dict[str, float]:
    return {
        "runs": len(runs),
        "mean_error": statistics.mean(abs(run["error"]) for run in runs),
        "worst_error": max((run["error"] for run in runs), key=abs),
        "mean_error_of_constant_utilization": statistics.mean(
            abs(run["error_of_constant_utilization"]) for run in runs
        ),
    }


def _interval(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the interval of some runs, and the shares of runs within the stated interval and within other sources'."""
    families = _grouped(runs, "family")
    widths = {
        family: sorted(abs(run["error"]) for run in members)[math.ceil(STATED * len(members)) - 1]
        for family, members in families.items()
    }
    held = [
        abs(run["error"]) <= max(width for other, width in widths.items() if other != run["family"])
        for run in runs
        if len(families) > 1
    ]
    stated = {run["stated"] for run in runs}
    return {
        **_summary(runs),
        "sources": len(families),
        "width": max(widths.values()),
        "stated": max(stated),
        "within_stated": sum(abs(run["error"]) <= min(stated) for run in runs) / len(runs),
        "within_others": statistics.mean(held) if held else None,
    }


def _print(heading: str, lines: Mapping[str, dict[str, Any]]) -> None:
    """Print a heading, and the numbers of each line after its name."""
    show: Callable[[str, float], str] = lambda name, value: (  # noqa: E731
        f"{value:.3f}" if name.endswith("seconds") else f"{value:+.1%}" if isinstance(value, float) else str(value)
    )
    print(f"\n{heading}")
    for name, line in lines.items():
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        print(f"{name:72} " + ", ".join(f"{key} {show(key, value)}" for key, value in numbers.items()))


if __name__ == "__main__":
    sys.exit(main())
