"""Renders the pages that the program's own tables make: commands, configuration, metrics, Megatron-LM's names.

    python tools/update_pages.py            # rewrite the pages and examples/config.schema.json
    python tools/update_pages.py --check    # exit 1 if one of them is out of date

What is rendered stands between `<!-- commands -->` and `<!-- end of commands -->`, `<!-- fields of SECTION -->` and
`<!-- end of fields -->`, `<!-- arguments: GROUP -->` and `<!-- end of arguments -->`, `<!-- metrics of GROUPS -->` and
`<!-- end of metrics -->`, `<!-- loggers -->` and `<!-- end of loggers -->`, or `<!-- environment -->` and
`<!-- end of environment -->`; everything else is written by hand.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path

from megatron_fanformer import cli, markdown
from megatron_fanformer.configuration import FieldDescription
from megatron_fanformer.formats.foreign_names import MEGATRON_LM, ForeignName
from megatron_fanformer.runtime.environment import SETTINGS
from megatron_fanformer.training.config_reference import run_sections, schema_text
from megatron_fanformer.training.loggers.registry import LOGGERS
from megatron_fanformer.training.metrics import METRIC_TABLE

ROOT = Path(__file__).parents[1]
COMMANDS_PAGE = ROOT / "docs" / "commands.md"
PAGE = ROOT / "docs" / "configuration.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
MEGATRON_PAGE = ROOT / "docs" / "from-megatron-lm.md"
SCHEMA = ROOT / "examples" / "config.schema.json"
COMMANDS = re.compile(r"(<!-- commands -->\n).*?(<!-- end of commands -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- fields of (\S+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
ARGUMENTS = re.compile(r"(<!-- arguments: ([\w ]+) -->\n).*?(<!-- end of arguments -->)", re.DOTALL)
METRICS = re.compile(r"(<!-- metrics of ([\w, ]+) -->\n).*?(<!-- end of metrics -->)", re.DOTALL)
LOGGER_TABLE = re.compile(r"(<!-- loggers -->\n).*?(<!-- end of loggers -->)", re.DOTALL)
ENVIRONMENT = re.compile(r"(<!-- environment -->\n).*?(<!-- end of environment -->)", re.DOTALL)
LINK = re.compile(r"docs/([\w-]+\.md)(#[\w-]+)?")


def main() -> int:
    """Rewrite the files, or report which of them is out of date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    options = parser.parse_args()
    changed = [
        file for file, text in rendered().items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file in changed:
        if options.check:
            print(f"{file.relative_to(ROOT)} is out of date; run {Path(__file__).name}")
        else:
            file.write_text(rendered()[file], encoding="utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return int(options.check and bool(changed))


def rendered() -> dict[Path, str]:
    """Each file, and what it should hold."""
    return {
        COMMANDS_PAGE: commands_page(COMMANDS_PAGE.read_text(encoding="utf-8")),
        PAGE: page(PAGE.read_text(encoding="utf-8")),
        GPU_PAGE: gpu_page(GPU_PAGE.read_text(encoding="utf-8")),
        METRICS_PAGE: metrics_page(METRICS_PAGE.read_text(encoding="utf-8")),
        MEGATRON_PAGE: megatron_page(MEGATRON_PAGE.read_text(encoding="utf-8")),
        SCHEMA: schema_text() + "\n",
    }


def commands_page(text: str) -> str:
    """The page of commands with the options that the parsers have."""
    (verbs,) = (action.choices for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    sections = "\n\n".join(_verb(name, parser) for name, parser in verbs.items())
    return COMMANDS.sub(lambda found: f"{found[1]}\n{sections}\n\n{found[2]}", text)


def _verb(name: str, parser: argparse.ArgumentParser) -> str:
    """A verb as its --help has it: what it does, its options by group, examples."""
    prose, _, examples = (parser.epilog or "").partition("examples:\n")
    # shell, where the other pages' blocks say bash: these examples are held to the parsers where --help is.
    parts = [f"## {name}", parser.description, *_options(parser), prose.strip()]
    parts.append(f"```shell\n{textwrap.dedent(examples)}\n```")
    return "\n\n".join(part for part in parts if part)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """A table for each group, under its title where a verb has several, and which options exclude one another."""
    parts = []
    positionals, options, *titled = parser._action_groups
    groups = [("", positionals._group_actions + options._group_actions)]
    groups += [(f"**{group.title}**", group._group_actions) for group in titled]
    for title, actions in groups:
        if rows := [_option(parser, action) for action in actions if action.dest != "help"]:
            parts += [title, "\n".join(["| argument | meaning |", "|---|---|", *rows])]
    for group in parser._mutually_exclusive_groups:
        first, *others = (f"`{action.option_strings[0]}`" for action in group._group_actions)
        parts.append(f"{first} is not combined with {', '.join(others)}.")
    return parts


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A row: the option as it is typed, what its help says, and whether it must be given."""
    formatter = parser._get_formatter()
    name = action.dest.upper() if action.option_strings else action.dest
    values = "" if action.nargs == 0 else formatter._format_args(action, name)
    typed = f"{', '.join(action.option_strings)} {values}".strip()
    meaning = [formatter._expand_help(action)] if action.help else []
    meaning += ["required"] if action.option_strings and action.required else []
    return f"| `{typed}` | {_cell('; '.join(meaning))} |"


def page(text: str) -> str:
    """The page with its tables rebuilt; raises KeyError for a section that does not exist."""
    tables = _tables()
    return TABLE.sub(lambda found: found[1] + tables[found[2]] + found[3], text)


def megatron_page(text: str) -> str:
    """The page of Megatron-LM's arguments, likewise."""
    return ARGUMENTS.sub(lambda found: found[1] + _arguments(MEGATRON_LM[found[2]]) + found[3], text)


def metrics_page(text: str) -> str:
    """The page of metrics and loggers, likewise; a table of metrics is of the groups that its mark names."""
    text = METRICS.sub(lambda found: found[1] + _metrics(found[2].split(", ")) + found[3], text)
    rows = (
        [name, f"`logging.{kind.setting}`" if kind.setting else "always", kind.where, kind.resumed]
        for name, kind in LOGGERS.items()
    )
    table = markdown.table(["logger", "set", "where", "a resumed run"], rows) + "\n"
    return LOGGER_TABLE.sub(lambda found: found[1] + table + found[2], text)


def gpu_page(text: str) -> str:
    """The page of GPUs with the table of the environment; settings that differ by name alone share a row."""
    names: dict[str, list[str]] = {}
    for setting in SETTINGS:
        names.setdefault(setting.reason, []).append(f"`{setting.variable}`")
    rows = [[", ".join(names.pop(each.reason)), each.when, each.reason] for each in SETTINGS if each.reason in names]
    columns = ["setting", "value", "why"]
    table = markdown.table(columns, rows) + "\n"
    return ENVIRONMENT.sub(lambda found: found[1] + table + found[2], text)


def _metrics(groups: list[str]) -> str:
    found = [metric for metric in METRIC_TABLE if metric.group in groups]
    rows = ([f"`{metric.name}`", metric.unit, metric.group, _cell(metric.text)] for metric in found)
    return markdown.table(["metric", "unit", "group", "what"], rows) + "\n"


def _arguments(rows: tuple[ForeignName, ...]) -> str:
    """Those of the same name in a line, those of another or with a difference in a table, those not here in a list."""
    same = [row for row in rows if row.field and not row.note and row.names == _argument(row.field)]
    others = [[_names(row), f"`{row.field}`", row.note] for row in rows if row.field and row not in same]
    missing = [f"- {_names(row)}: {row.note}" for row in rows if not row.field]
    parts = [
        f"The same name: {', '.join(f'`{row.field}`' for row in same)}." if same else "",
        markdown.table(["Megatron-LM", "here", "difference"], others) if others else "",
        "No setting:\n\n" + "\n".join(missing) if missing else "",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _names(row: ForeignName) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split())


def _argument(field: str) -> str:
    """Return Megatron-LM's argument of a field's name."""
    return "--" + field.rpartition(".")[2].replace("_", "-")


def _tables() -> dict[str, str]:
    by_section: dict[str, list[FieldDescription]] = {}
    for _, _, fields in run_sections():
        for field in fields:
            by_section.setdefault(field.name.rpartition(".")[0], []).append(field)
    return {section: _table(fields) for section, fields in by_section.items()}


def _table(fields: list[FieldDescription]) -> str:
    rows = ([f"`{field.name.rpartition('.')[2]}`", _cell(_default(field)), _cell(field.text)] for field in fields)
    return markdown.table(["field", "default", "meaning"], rows) + "\n"


def _default(field: FieldDescription) -> str:
    """A field's default and, in parentheses where it does not show them, its type or other choices."""
    if field.default is None:
        return f"required ({field.type})"
    if field.type in ("integer", "number", "text", "true or false"):
        return field.default
    choices = field.type.removesuffix(f" or {field.default}").replace("true or false", "boolean").split(", ")
    shown = f"`{field.default}`"
    if shown not in choices:
        return f"{field.default} ({', '.join(choices)})"
    return f"{shown} ({', '.join(choice for choice in choices if choice != shown)})"


def _cell(text: str) -> str:
    """A docstring as a cell: its mentions of pages become links from within docs/."""
    return LINK.sub(lambda found: f"[{found[1]}]({found[1]}{found[2] or ''})", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
