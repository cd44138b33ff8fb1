"""An experiment's folder, and one page for one or many experiments, as Markdown and as HTML that needs no other file.

It says of each finding what the paper says, what came out here with its interval, whether the settings were the
paper's, and what that means in a sentence. It reads results alone.
"""

import base64
import html
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_fanformer import markdown
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.experiments.result import Cell, Finding, Result, Table, write_result
from megatron_fanformer.markdown import as_text

Experiments = Sequence[tuple[Path, Result]]
"""Experiments' folders and their results."""

README = "README.md"
FINDING_COLUMNS = ("finding", "paper", "ours", "95% interval", "settings", "the effect")
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
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:85%;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.2em .5em;text-align:left}img{max-width:100%}"
)


# -- the folder: its files, README.md, and last the result, so that a folder that has one is whole


def write_folder(folder: Path, result: Result, files: Mapping[str, str | bytes]) -> None:
    """Write a folder, which is made if missing.

    Args:
        files: contents by name; the pictures of the result among them.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    write_atomically(folder / README, as_markdown([(folder, result)], at=folder))
    write_result(folder, result)


# -- the page


def as_markdown(experiments: Experiments, *, at: Path) -> str:
    """Return the page as Markdown.

    Args:
        at: the folder that it is written to; pictures are named from there.
    """
    lines: list[str] = []
    for kind, content in _blocks(experiments):
        match kind:
            case "title" | "heading":
                lines += [f"{'#' if kind == 'title' else '##'} {as_text(content)}", ""]
            case "items":
                lines += [*(f"- {as_text(item)}" for item in content), ""]
            case "text":
                lines += [as_text(content), ""]
            case "picture":
                target = quote(os.path.relpath(content, at))
                lines += [f"![{as_text(content.name)}]({target})", ""]
            case "table":
                rows = ([as_text(shown(cell)) for cell in row] for row in content.rows)
                table = markdown.table([as_text(column) for column in content.columns], rows)
                lines += [f"**{as_text(content.title)}**", "", table, ""]
    return "\n".join(lines)


def as_html(experiments: Experiments) -> str:
    """Return the page as HTML, its pictures in it."""
    lines = ['<!doctype html><html lang="en"><meta charset="utf-8"><title>The paper\'s experiments</title>']
    lines.append(f"<style>{_STYLE}</style>")
    for kind, content in _blocks(experiments):
        match kind:
            case "title" | "heading" | "text":
                tag = {"title": "h1", "heading": "h2", "text": "p"}[kind]
                lines.append(f"<{tag}>{html.escape(content)}</{tag}>")
            case "items":
                lines += ["<ul>", *(f"<li>{html.escape(item)}</li>" for item in content), "</ul>"]
            case "picture":
                data = base64.b64encode(content.read_bytes()).decode()
                lines.append(f'<p><img alt="{html.escape(content.name)}" src="data:image/png;base64,{data}"></p>')
            case "table":
                heads = "".join(f"<th>{html.escape(name)}</th>" for name in content.columns)
                lines += [f"<h3>{html.escape(content.title)}</h3>", f"<table><tr>{heads}</tr>"]
                for row in content.rows:
                    lines.append("<tr>" + "".join(f"<td>{html.escape(shown(cell))}</td>" for cell in row) + "</tr>")
                lines.append("</table>")
    return "\n".join([*lines, "</html>"]) + "\n"


def _blocks(experiments: Experiments) -> Iterator[tuple[str, Any]]:
    """Yield each block of the page: its kind, and a text, several, a picture's file or a table."""
    yield "title", "The paper's experiments"
    yield "table", summary_of(experiments)
    for folder, result in experiments:
        yield "heading", result.experiment
        yield "items", [finding.sentence for finding in result.findings]
        yield "text", _settings(result)
        yield "text", _provenance(folder, result)
        yield from (("picture", folder / picture) for picture in result.pictures)
        yield from (("table", table) for table in result.tables)
    yield "heading", "What to keep in mind"
    yield "items", CAVEATS


def summary_of(experiments: Experiments) -> Table:
    """Return all findings, a row each."""
    rows: list[list[Cell]] = [
        [
            finding.name,
            finding.paper or "–",
            "–" if finding.ours is None else f"{shown(finding.ours)} {finding.unit}",
            _interval(finding),
            "the paper's" if finding.same_settings else "our own",
            "exploratory"
            if finding.exploratory
            else {True: "shows", False: "does not show", None: "inconclusive"}[finding.shows],
        ]
        for _, result in experiments
        for finding in result.findings
    ]
    return Table(title="Findings", columns=list(FINDING_COLUMNS), rows=rows)


def shown(cell: Cell) -> str:
    """Return a cell of a table in print: five significant digits, whole numbers whole."""
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


def _interval(finding: Finding) -> str:
    if finding.interval is None:
        return "–"
    low, high = finding.interval
    return f"{'−∞' if low is None else shown(low)} to {'∞' if high is None else shown(high)}"


def _settings(result: Result) -> str:
    """Return the settings that are values or lists of them; a sweep's whole configuration is in its result alone."""
    values = {
        name: ", ".join(str(shown(each)) for each in value) or "none" if isinstance(value, list) else shown(value)
        for name, value in result.settings.items()
        if not isinstance(value, dict)
    }
    return f"Settings: {'; '.join(f'{name} {text}' for name, text in values.items())}."


def _provenance(folder: Path, result: Result) -> str:
    machine = result.machine
    cores = machine.get("cores", "?")
    parts = [
        f"{cores} {'core' if cores == 1 else 'cores'} ({machine.get('processor', '?')})",
        machine.get("gpu") or "no GPU",
        f"{timedelta(seconds=round(result.seconds))} of computing",
        f"all settings and numbers in {folder.name}/result.json",
    ]
    return f"Measured on {', '.join(parts)}."
