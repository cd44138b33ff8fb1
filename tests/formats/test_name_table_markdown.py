"""docs/conversion.md shows the table as the code has it."""

from pathlib import Path

from megatron_fanformer.formats.name_table_markdown import BEGIN, END, render, rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "conversion.md"


def test_the_document_shows_the_table_of_the_code() -> None:
    _, shown = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    assert shown.split(END)[0].strip() == render()


def test_a_row_of_the_table_is_a_line() -> None:
    lines = render().splitlines()
    assert len(lines) == len(rows()) + 2
    assert {line.count(" | ") for line in lines if "---" not in line} == {4}
