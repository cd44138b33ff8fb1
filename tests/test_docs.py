"""The documentation hangs together: its links lead somewhere, and the site has all that they lead to."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
NAVIGATION: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\bdocs/[\w-]+\.md(?:#[\w-]+)?")  # in a docstring, an error, an example's comment
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def beside_docs() -> set[str]:
    """What tools/site_files.py adds to the site; mkdocs, which it imports, need not be installed."""
    tree = ast.parse((ROOT / "tools" / "site_files.py").read_text())
    (value,) = (
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "BESIDE_DOCS"
    )
    return set(ast.literal_eval(value))


FILES = beside_docs() | {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file()}
PAGES = sorted(ROOT / name for name in FILES if name.endswith(".md"))


def links(page: Path) -> list[str]:
    """The targets in this repository of a page's links and pictures."""
    return [target for target in LINK.findall(CODE.sub("", page.read_text())) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them; every heading has one of its own."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    made = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(made) == len(set(made)), f"{page} has a heading twice"
    return set(made)


def leads_somewhere(target: str, page: Path) -> bool:
    """Whether the site has the file that a page names, and this the anchor."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return str(file.relative_to(ROOT)) in FILES and (not anchor or anchor in anchors(file))


def test_every_link_leads_to_a_file_and_a_heading_of_the_site() -> None:
    assert [
        f"{page.name}: {target}" for page in PAGES for target in links(page) if not leads_somewhere(target, page)
    ] == []


def test_every_mention_of_a_page_leads_somewhere() -> None:
    sources = [path for folder in ("megatron_fanformer", "tools", "examples") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".sh", ".yaml")}
    mentions = [(path, found) for path, text in texts.items() for found in MENTION.findall(text)]
    assert [f"{path}: {found}" for path, found in mentions if not leads_somewhere(found, ROOT / "README.md")] == []


def named(entries: list[Any]) -> Iterator[str]:
    """The pages of a navigation, those within sections among them."""
    for entry in entries:
        (value,) = entry.values()
        yield from named(value) if isinstance(value, list) else [value]


def test_the_navigation_has_every_page_once() -> None:
    of_tests = {"tests/README.md", "tests/reference/README.md"}  # what only those who change the project read
    assert sorted(named(NAVIGATION)) == sorted({str(page.relative_to(ROOT)) for page in PAGES} - of_tests)


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in links(page)}
    assert sorted(path.name for path in (ROOT / "docs" / "images").iterdir() if path not in shown) == []
