"""The table of names as docs/conversion.md shows it.

`python -m megatron_fanformer.formats.name_table_markdown` prints it.
"""

from megatron_fanformer import markdown
from megatron_fanformer.formats.name_table import EMBEDDING, FINAL_NORM, HEAD, Naming, Row, layer_row
from megatron_fanformer.model.placements import PLACEMENTS, all_tensors
from megatron_fanformer.model.placements.base import HEAD_NORMS, LayerTensor

COLUMNS = ("Megatron", "shape", "placements", "reference", "Hugging Face")
BEGIN, END = "<!-- the table of names: rendered, do not edit -->", "<!-- end of the table of names -->"


def render() -> str:
    """Return rows of Markdown: the names in the three formats, and the transform where it moves rows."""
    return markdown.table(COLUMNS, [_cells(row, present) for row, present in rows()])


def rows() -> list[tuple[Row, str]]:
    """Return the rows of all models, each with the placements at which a model has its tensor."""
    of_layers = [(layer_row(tensor), _present(tensor, names)) for tensor, names in all_tensors().items()]
    return [(EMBEDDING, "all"), *of_layers, (FINAL_NORM, "all"), (HEAD, "all, untied")]


def _present(tensor: LayerTensor, names: list[str]) -> str:
    others = [name for name in PLACEMENTS if name not in names]
    if len(others) > 1:
        return ", ".join(names)
    if tensor in HEAD_NORMS:
        return "with `qk_layernorm`"
    return f"all but {others[0]}" if others else "all"


def _cells(row: Row, present: str) -> tuple[str, ...]:
    (name,) = row.megatron.names
    shape = ", ".join(size.symbol for size in row.shape)
    return _name(name), f"[{shape}]", present, _form(row.reference), _form(row.hf)


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
