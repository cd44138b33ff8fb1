"""Renders the configuration's dataclasses, the JSON schema, and the names that Megatron-LM has for the fields.

    python tools/update_configuration_page.py            # rewrite both pages and examples/config.schema.json
    python tools/update_configuration_page.py --check    # exit 1 if one of them is out of date

A table is between `<!-- fields of SECTION -->` and `<!-- end of fields -->`, or `<!-- arguments: GROUP -->` and
`<!-- end of arguments -->`; everything else on the pages is written by hand.
"""

import argparse
import re
import sys
from pathlib import Path

from megatron_fanformer import markdown
from megatron_fanformer.configuration import FieldDescription
from megatron_fanformer.formats.foreign_names import MEGATRON_LM, ForeignName
from megatron_fanformer.training.config_reference import run_sections, schema_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MEGATRON_PAGE = ROOT / "docs" / "from-megatron-lm.md"
SCHEMA = ROOT / "examples" / "config.schema.json"
TABLE = re.compile(r"(<!-- fields of (\S+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
ARGUMENTS = re.compile(r"(<!-- arguments: ([\w ]+) -->\n).*?(<!-- end of arguments -->)", re.DOTALL)
LINK = re.compile(r"docs/([\w-]+\.md)(#[\w-]+)?")


def main() -> int:
    """Rewrite the files, or report which of them is out of date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    options = parser.parse_args()
    changed = [file for file, text in rendered().items() if not file.exists() or file.read_text() != text]
    for file in changed:
        if options.check:
            print(f"{file.relative_to(ROOT)} does not match the dataclasses; run {Path(__file__).name}")
        else:
            file.write_text(rendered()[file])
            print(f"wrote {file.relative_to(ROOT)}")
    return int(options.check and bool(changed))


def rendered() -> dict[Path, str]:
    """Each file, and what it should hold."""
    return {
        PAGE: page(PAGE.read_text()),
        MEGATRON_PAGE: megatron_page(MEGATRON_PAGE.read_text()),
        SCHEMA: schema_text() + "\n",
    }


def page(text: str) -> str:
    """The page with its tables rebuilt; raises KeyError for a section that does not exist."""
    tables = _tables()
    return TABLE.sub(lambda found: found[1] + tables[found[2]] + found[3], text)


def megatron_page(text: str) -> str:
    """The page of Megatron-LM's arguments, likewise."""
    return ARGUMENTS.sub(lambda found: found[1] + _arguments(MEGATRON_LM[found[2]]) + found[3], text)


def _arguments(rows: tuple[ForeignName, ...]) -> str:
    cells = [
        [
            ", ".join(f"`{name}`" for name in row.names.split()),
            f"`{row.field}`" if row.field else "not there",
            row.note if row.field else f"because {row.note}",
        ]
        for row in rows
    ]
    return markdown.table(["Megatron-LM", "here", ""], cells) + "\n"


def _tables() -> dict[str, str]:
    by_section: dict[str, list[FieldDescription]] = {}
    for _, _, fields in run_sections():
        for field in fields:
            by_section.setdefault(field.name.rpartition(".")[0], []).append(field)
    return {section: _table(fields) for section, fields in by_section.items()}


def _table(fields: list[FieldDescription]) -> str:
    rows = (
        [f"`{field.name.rpartition('.')[2]}`", _cell(field.type), _default(field), _cell(field.text)]
        for field in fields
    )
    return markdown.table(["field", "type", "default", "meaning"], rows) + "\n"


def _default(field: FieldDescription) -> str:
    if field.default is None:
        return "–"
    return f"`{field.default}`" if field.type.startswith("`") and field.default != "null" else _cell(field.default)


def _cell(text: str) -> str:
    """A docstring as a cell: its mentions of pages become links from within docs/."""
    return LINK.sub(lambda found: f"[{found[1]}]({found[1]}{found[2] or ''})", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
