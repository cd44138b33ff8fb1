"""Writes the result of an experiment into the experiment's folder, and renders results as a Markdown page.

An experiment's folder has pictures, README.md, and result.json, which is written last: a folder with result.json is
complete, and `report` reads no other file. For each finding the page has the paper's figure, ours with an interval, and
a sentence with the conclusion.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from megatron_fanformer import markdown
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.markdown import as_text
from megatron_fanformer.processes import usable_cores

RESULT, README = "result.json", "README.md"

Cell = str | int | float | bool | None  # of a table


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of the paper, and the result here."""

    name: str
    paper: str | None = None
    """The paper's figure or claim; None if the paper has neither."""
    ours: float | None
    """Our figure; None if nothing could be measured."""
    interval: tuple[float | None, float | None] | None = None
    """The low and the high end of the 95% interval; an infinite end is None. The field is None if there is no interval,
    as with one seed, or if both ends are infinite."""
    unit: str
    shows: bool | None
    """Whether the effect shows, by a rule that was fixed before the runs; None if the runs are inconclusive."""
    exploratory: bool = False
    """True if the comparison was not stated before the runs; such a comparison cannot show an effect."""
    sentence: str
    """The rule and its outcome in plain words."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under headings."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an experiment."""

    experiment: str
    version: int = 1
    settings: dict[str, Any]
    """All settings that determine the result."""
    machine: dict[str, Any]
    """The machine on which it was measured."""
    seconds: float
    findings: list[Finding]
    tables: list[Table] = []
    pictures: list[str] = []
    """File names in the result's folder."""


Log = Callable[[str], None]  # takes a line about a probe's progress


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of an experiment, before they are written."""

    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files by their names."""
    seconds: float | None = None
    """Computing time of all calls together, if earlier calls did a part of the work; None: the time of this call."""


def write_folder(folder: Path, experiment: str, settings: dict[str, Any], measured: Measured) -> Result:
    """Write the result of an experiment into `folder`, creating the folder if it is missing; return the result."""
    import torch

    from megatron_fanformer.checkpoint.manifest import versions

    machine = {
        "cores": usable_cores(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions(),
    }
    result = Result(
        experiment=experiment,
        settings=settings,
        machine=machine,
        seconds=measured.seconds or 0.0,
        findings=measured.findings,
        tables=measured.tables,
        pictures=list(measured.pictures),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in measured.pictures.items():
        write_atomically(folder / name, picture)
    write_atomically(folder / README, as_markdown([(folder, result)], at=folder))
    write_atomically(folder / RESULT, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def read_result(folder: Path) -> Result:
    """Return the result in an experiment's folder.

    Raises:
        InputError: result.json cannot be read.
        CorruptError: result.json is damaged, or is not the result of an experiment.
    """
    file = folder / RESULT
    try:
        return msgspec.json.decode(file.read_bytes(), type=Result)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name the folder of an experiment") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{file} is not the result of an experiment ({error}); run it again") from None


# -- the page

Experiments = Sequence[tuple[Path, Result]]  # each experiment's folder and result

FINDING_COLUMNS = ("finding", "paper", "ours", "95% interval", "the effect")
CAVEATS = (
    "An interval is over the seeds or the samples of this experiment, not over data sets, sizes or recipes.",
    "Of twenty effects that are not there, one shows at 95%: a page of many findings is to be read with that in mind.",
    "A model of a laptop's size says little about one of a billion parameters: an effect that does not show here is "
    "not refuted, and one that does is not confirmed at the paper's size.",
    "The paper's 11-task mean has a binomial standard error of 0.89 points, so that 53.10 to 55.19 is 1.7 standard "
    "errors of their difference, unpaired.",
    "In the paper's table of tasks mrpc is F1, where always answering yes gives 81.22, its figure for three models; "
    "the majority class gives 52.7 on rte and 50.9 on sst2.",
    "The paper's mean perplexity is the mean of the sets' perplexities (30.20), not the exponential of their mean loss "
    "(27.84).",
)
"""Caveats that every report must state."""


def as_markdown(experiments: Experiments, *, at: Path) -> str:
    """Return the page of these experiments as Markdown.

    Args:
        at: the page's folder; links to pictures are relative to it.
    """
    rows = [_finding_row(finding) for _, result in experiments for finding in result.findings]
    lines = ["# The paper's experiments", "", *_render(Table(title="Findings", columns=[*FINDING_COLUMNS], rows=rows))]
    for folder, result in experiments:
        # dicts, such as a sweep's configuration, are only in result.json
        settings = [f"{name} {shown(value)}" for name, value in result.settings.items() if not isinstance(value, dict)]
        machine = (
            f"Measured on {result.machine.get('cores', '?')} cores ({result.machine.get('processor', '?')}), "
            f"{result.machine.get('gpu') or 'no GPU'}, {timedelta(seconds=round(result.seconds))} of computing, "
            f"all settings and numbers in {folder.name}/{RESULT}."
        )
        lines += [
            f"## {as_text(result.experiment)}",
            "",
            *(f"- {as_text(finding.sentence)}" for finding in result.findings),
            "",
            as_text(f"Settings: {'; '.join(settings)}."),
            "",
            as_text(machine),
            "",
        ]
        for picture in result.pictures:
            lines += [f"![{as_text(picture)}]({quote(os.path.relpath(folder / picture, at))})", ""]
        for table in result.tables:
            lines += _render(table)
    return "\n".join([*lines, "## What to keep in mind", "", *(f"- {as_text(text)}" for text in CAVEATS), ""])


def _render(table: Table) -> list[str]:
    columns = [as_text(column) for column in table.columns]
    rows = ([as_text(shown(cell)) for cell in row] for row in table.rows)
    return [f"**{as_text(table.title)}**", "", markdown.table(columns, rows), ""]


def _finding_row(finding: Finding) -> list[Cell]:
    """Return the cells of a finding, one for each of `FINDING_COLUMNS`."""
    interval = "–"
    if finding.interval is not None:
        low, high = finding.interval
        interval = f"{'−∞' if low is None else shown(low)} to {'∞' if high is None else shown(high)}"
    effect = {True: "shows", False: "does not show", None: "inconclusive"}[finding.shows]
    return [
        finding.name,
        finding.paper or "–",
        "–" if finding.ours is None else f"{shown(finding.ours)} {finding.unit}",
        interval,
        "exploratory" if finding.exploratory else effect,
    ]


def shown(value: Cell | list[Any]) -> str:
    """Format a value: floats with five significant digits, or as integers from 10,000 on; lists with commas."""
    match value:
        case list():
            return ", ".join(shown(item) for item in value)
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
    return value
