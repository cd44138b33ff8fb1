"""The result of an experiment in its folder, and a Markdown page of one or many.

An experiment's folder has its pictures, README.md, and result.json. The latter is written last, so that a folder that
has it is complete, and `report` reads nothing else. For each finding the page has the paper's figure, ours with an
interval, and a sentence with the conclusion.
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

Cell = str | int | float | bool | None
"""A cell of a table."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of the paper, and the result here."""

    name: str
    paper: str | None = None
    """The paper's figure or claim; None where it has none."""
    ours: float | None
    """Our figure; None if nothing could be measured."""
    interval: tuple[float | None, float | None] | None = None
    """95% interval, low to high, with None for an infinite end. Without an interval, as for one seed, or with an empty
    one, the whole is None."""
    unit: str
    shows: bool | None
    """True if the effect shows, by a rule that was fixed beforehand; None: inconclusive."""
    exploratory: bool = False
    """True if the comparison was not stated beforehand, so that it cannot show anything."""
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


Log = Callable[[str], None]
"""Called with a line on a probe's progress."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of an experiment, before they are written."""

    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files by their names."""
    seconds: float | None = None
    """Computing time, if earlier calls did a part of the work; None: the time of this call."""


def write_folder(folder: Path, experiment: str, settings: dict[str, Any], measured: Measured) -> Result:
    """Write the result of an experiment to its folder, which is made if missing; return the result."""
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
        InputError: there is no result.
        CorruptError: the file is damaged, or no experiment's result.
    """
    file = folder / RESULT
    try:
        return msgspec.json.decode(file.read_bytes(), type=Result)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name the folder of an experiment") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{file} is not the result of an experiment ({error}); run it again") from None


# -- the page

Experiments = Sequence[tuple[Path, Result]]
"""Experiments' folders and their results."""

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
    """Return the page as Markdown.

    Args:
        at: the folder of the page, from which pictures are linked.
    """
    rows = [_row(finding) for _, result in experiments for finding in result.findings]
    lines = ["# The paper's experiments", "", *_table(Table(title="Findings", columns=[*FINDING_COLUMNS], rows=rows))]
    for folder, result in experiments:
        settings = {
            name: ", ".join(str(shown(item)) for item in value) if isinstance(value, list) else shown(value)
            for name, value in result.settings.items()
            if not isinstance(value, dict)  # a sweep's whole configuration is in its result alone
        }
        machine = (
            f"Measured on {result.machine.get('cores', '?')} cores ({result.machine.get('processor', '?')}), "
            f"{result.machine.get('gpu') or 'no GPU'}, {timedelta(seconds=round(result.seconds))} of computing, "
            f"all settings and numbers in {folder.name}/{RESULT}."
        )
        lines += [
            *(f"## {as_text(result.experiment)}", ""),
            *(f"- {as_text(finding.sentence)}" for finding in result.findings),
            *("", as_text(f"Settings: {'; '.join(f'{name} {text}' for name, text in settings.items())}.")),
            *("", as_text(machine), ""),
        ]
        for picture in result.pictures:
            lines += [f"![{as_text(picture)}]({quote(os.path.relpath(folder / picture, at))})", ""]
        for table in result.tables:
            lines += _table(table)
    return "\n".join([*lines, "## What to keep in mind", "", *(f"- {as_text(text)}" for text in CAVEATS), ""])


def _table(table: Table) -> list[str]:
    rows = ([as_text(shown(cell)) for cell in row] for row in table.rows)
    text = markdown.table([as_text(column) for column in table.columns], rows)
    return [f"**{as_text(table.title)}**", "", text, ""]


def _row(finding: Finding) -> list[Cell]:
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


def shown(cell: Cell) -> str:
    """Format a cell of a table: floats with five significant digits, integers with all digits."""
    match cell:
        case None:
            return "–"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 10_000 else f"{cell:.5g}"
    return cell
