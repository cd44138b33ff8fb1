"""The table of names as docs/conversion.md shows it.

`python -m megatron_fanformer.formats.name_table_markdown` prints it.
"""

from megatron_fanformer import markdown
from megatron_fanformer.formats.name_table import NAME_TABLE, Naming, Row

COLUMNS = ("Megatron", "shape", "present", "reference", "Hugging Face")
BEGIN, END = "<!-- the table of names: rendered, do not edit -->", "<!-- end of the table of names -->"


def render() -> str:
    """Rows of Markdown: the names in the three formats, and the transform where it moves rows."""
    return markdown.table(COLUMNS, map(_cells, NAME_TABLE))


def _cells(row: Row) -> tuple[str, ...]:
    (name,) = row.megatron.names
    shape = ", ".join(row.shape)
    return _name(name), f"[{shape}]", row.present, _form(row.reference), _form(row.hf)


def _form(form: Naming) -> str:
    if not form.names:
        return "–"
    names = ", ".join(map(_name, form.names))
    moved = "" if form.transform.name == "as it is" else f": {form.transform.name.replace('|', chr(92) + '|')}"
    return names + moved


def _name(name: str) -> str:
    return f"`{name.replace('{layer}', 'i')}`"


if __name__ == "__main__":
    print(render())
