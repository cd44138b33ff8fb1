"""Render the documentation's tables from the program: commands, fields, metrics, names.

    python tools/page_tables.py build/page_tables.json    # `make docs` does, before it builds the site

A page marks the place of a table by `<!-- table: NAME -->`; tools/site_files.py replaces the mark.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

from megatron_fanformer import cli, markdown
from megatron_fanformer.configuration import FieldDescription
from megatron_fanformer.convert.megatron_names import COUNTERPARTS
from megatron_fanformer.convert.name_table import EMBEDDING, FINAL_NORM, HEAD, Naming, Row, layer_row
from megatron_fanformer.model.placements import HEAD_NORMS, PLACEMENTS, all_tensors
from megatron_fanformer.train.config_reference import run_sections
from megatron_fanformer.train.metrics import METRIC_TABLE

LINK = re.compile(r"docs/([\w-]+\.md)(#[\w-]+)?")


def tables() -> dict[str, str]:
    """Return Markdown by the name of the table."""
    return {
        "commands": _commands(),
        "tensors": _tensors(),
        **{f"fields of {section}": text for section, text in _fields().items()},
        "arguments": _arguments(),
        "metrics": _metrics(is_health=False),
        "metrics of health": _metrics(is_health=True),
    }


def _commands() -> str:
    """Return a section for each verb, as --help shows it: description, options by group, notes, examples."""
    (verbs,) = (action.choices for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, parser in verbs.items():
        prose, _, examples = (parser.epilog or "").partition("examples:\n")
        parts += [f"## {name}", parser.description, *_options(parser), prose.strip()]
        parts.append(f"```shell\n{textwrap.dedent(examples)}\n```")
    return "\n\n".join(filter(None, parts))


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return a table for each group of options, and a sentence for each group of options that exclude one another."""
    positionals, options, *titled = parser._action_groups
    groups = [("", positionals._group_actions + options._group_actions)]
    groups += [(f"**{group.title}**", group._group_actions) for group in titled]
    parts = []
    for title, actions in groups:
        if rows := [_option(parser, action) for action in actions if action.dest != "help"]:
            parts += [title, markdown.table(["argument", "meaning"], rows)]
    for group in parser._mutually_exclusive_groups:
        first, *others = (f"`{action.option_strings[0]}`" for action in group._group_actions)
        parts.append(f"{first} is not combined with {', '.join(others)}.")
    return parts


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    formatter = parser._get_formatter()
    name = action.dest.upper() if action.option_strings else action.dest
    values = "" if action.nargs == 0 else formatter._format_args(action, name)
    meaning = [formatter._expand_help(action)] if action.help else []
    meaning += ["required"] if action.option_strings and action.required else []
    typed = f"{', '.join(action.option_strings)} {values}".strip()
    return [f"`{typed}`", _cell("; ".join(meaning))]


def _fields() -> dict[str, str]:
    by_section: dict[str, list[list[str]]] = {}
    for _, _, fields in run_sections():
        for field in fields:
            section, _, name = field.name.rpartition(".")
            by_section.setdefault(section, []).append([f"`{name}`", _cell(_default(field)), _cell(field.text)])
    return {section: markdown.table(["field", "default", "meaning"], rows) for section, rows in by_section.items()}


def _default(field: FieldDescription) -> str:
    """Return a field's default, with the type in parentheses if the default does not show it."""
    if field.default is None:
        return f"required ({field.type})"
    if field.type in ("an integer", "a finite number", "text", "true or false"):
        return field.default
    return f"{field.default} ({field.type})"


def _metrics(*, is_health: bool) -> str:
    metrics = [metric for metric in METRIC_TABLE if (metric.group == "health") == is_health]
    rows = ([f"`{metric.name}`", metric.unit, metric.group, _cell(metric.text)] for metric in metrics)
    return markdown.table(["metric", "unit", "group", "meaning"], rows)


def _arguments() -> str:
    """Return the table of Megatron-LM's arguments whose field has another name here."""
    rows = [[f"`--{name.replace('_', '-')}`", f"`{row.field}`", _cell(row.note)] for name, row in COUNTERPARTS.items()]
    return markdown.table(["Megatron-LM", "here", "difference"], rows)


def _tensors() -> str:
    """Return the table of tensors: names in the three formats, shapes, and the transforms that move rows."""
    rows = [(EMBEDDING, "all")]
    for tensor, placements in all_tensors().items():
        absent = [name for name in PLACEMENTS if name not in placements]
        if len(absent) > 1:
            present = ", ".join(placements)
        elif tensor in HEAD_NORMS:
            present = "with `qk_layernorm`"
        else:
            present = f"all but {absent[0]}" if absent else "all"
        rows.append((layer_row(tensor), present))
    rows += [(FINAL_NORM, "all"), (HEAD, "all, untied")]
    columns = ["Megatron", "shape", "placements", "reference", "Hugging Face"]
    return markdown.table(columns, [_tensor(row, present) for row, present in rows])


def _tensor(row: Row, present: str) -> list[str]:
    shape = ", ".join(size.symbol for size in row.shape)
    (name,) = row.megatron.names
    return [f"`{name.replace('{layer}', 'i')}`", f"[{shape}]", present, _form(row.reference), _form(row.hf)]


def _form(form: Naming) -> str:
    if not form.names:
        return "–"
    names = ", ".join(f"`{name.replace('{layer}', 'i')}`" for name in form.names)
    return names if form.transform.name == "as it is" else f"{names}: {_cell(form.transform.name)}"


def _cell(text: str) -> str:
    """Return a docstring as a cell of a table; mentions of pages become links that work within docs/."""
    return LINK.sub(lambda match: f"[{match[1]}]({match[1]}{match[2] or ''})", text).replace("|", "\\|")


if __name__ == "__main__":
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(tables()), encoding="utf-8")
