"""Runs `megatron-fanformer report`: a page of experiments, or two runs compared."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.report.page import README, as_html, as_markdown
from megatron_fanformer.experiments.result import RESULT, read_result
from megatron_fanformer.options import PROGRAM, Verb, argument, option
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import plural, show

COMPARE = "compare"
PAGE, COMPARISON = Path("runs/report.html"), Path("runs/dynamics")  # where nothing else is named
FOLDER = "runs"
PAGE_SUFFIXES = (".html", ".md")
MOST_DEPTH = 3  # of folders below a named one


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    paths: tuple[str, ...] = argument((), metavar="FOLDER")
    """Experiments, or folders of them (default: runs); or the word compare, and the folders of runs of two
    configurations, which may have several seeds each."""
    output: Path | None = option(None, metavar="PAGE")
    """A page .html, which is written as .md, too (default: runs/report.html); with compare a folder (default:
    runs/dynamics)"""


def report(options: ReportOptions) -> None:
    """Write the page, or the comparison.

    Raises:
        InputError: there is no experiment, or the runs cannot be compared.
        CorruptError: a result is not whole.
    """
    if options.paths[:1] == (COMPARE,):
        _compare([Path(path) for path in options.paths[1:]], options.output or COMPARISON)
        return
    page = options.output or PAGE
    if page.suffix not in PAGE_SUFFIXES:
        names = " or ".join(f"NAME{suffix}" for suffix in PAGE_SUFFIXES)
        raise InputError(f"--output {page} is no page; name it {names}")
    experiments = [(folder, read_result(folder)) for folder in _folders(options.paths or (FOLDER,))]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page.with_suffix(".md"), as_markdown(experiments, at=page.parent))
    write_atomically(page.with_suffix(".html"), as_html(experiments))
    show(finding.sentence for _, result in experiments for finding in result.findings)
    written = f"{page.with_suffix('.html')} and {page.with_suffix('.md').name}"
    show([f"wrote {written}, of {plural(len(experiments), 'experiment')}"])


def _folders(named: Sequence[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for folder in map(Path, named):
        depths = range(MOST_DEPTH + 1)
        below = [file.parent for depth in depths for file in sorted(folder.glob("*/" * depth + RESULT))]
        if not below:
            raise InputError(
                f"{folder} has no {RESULT}, nor have folders in it; name a sweep with a report, or a probe"
            )
        found |= dict.fromkeys(below)
    return list(found)


def _compare(runs: Sequence[Path], output: Path) -> None:
    if len(runs) < 2:
        named = f"; `{PROGRAM} inspect {shlex.quote(str(runs[0]))} --picture FILE` draws its losses" if runs else ""
        raise InputError(f"{COMPARE} has {plural(len(runs), 'run')}, and compares those of two configurations{named}")
    device.prepare_libraries()
    from megatron_fanformer.experiments.report.dynamics import compare_runs

    show([*(finding.sentence for finding in compare_runs(runs, output).findings), f"wrote {output / README}"])


REPORT = Verb(
    name="report",
    help="Write the page of the paper's experiments; compare two runs step by step.",
    options=ReportOptions,
    run=report,
    examples=("report runs/sweeps --output runs/report.html", "report compare runs/transformer runs/fanformer"),
)
