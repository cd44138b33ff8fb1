"""The documentation hangs together: links and mentions lead somewhere, and the navigation has every page."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\bdocs/[\w-]+\.md(?:#[\w-]+)?")  # in a docstring, an error, an example's comment
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = tool("site_files")
FILES = SITE.site_files()
PAGES = [ROOT / name for name in FILES if name.endswith(".md")]


def links(page: Path) -> list[str]:
    """The targets in this repository of a page's links and pictures."""
    prose = INLINE_CODE.sub("", FENCED.sub("", page.read_text()))
    return [target for target in LINK.findall(prose) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them; every heading has one of its own."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    made = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(made) == len(set(made)), f"{page} has a heading twice"
    return set(made)


def leads_somewhere(target: str, page: Path) -> bool:
    """Whether there is the file that a page names, and in it the heading."""
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.is_file() and (not anchor or anchor in anchors(file))


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = [(page.name, target) for page in PAGES for target in links(page) if not leads_somewhere(target, page)]
    assert broken == []


def test_every_mention_of_a_page_leads_somewhere() -> None:
    sources = [path for folder in ("megatron_fanformer", "tools", "examples") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".sh", ".yaml")}
    mentions = [(path, found) for path, text in texts.items() for found in MENTION.findall(text)]
    assert mentions
    assert [(path, found) for path, found in mentions if not leads_somewhere(found, ROOT / "README.md")] == []


def named(entries: list[Any]) -> Iterator[str]:
    """The pages of a navigation, those within sections among them."""
    for entry in entries:
        (value,) = entry.values()
        yield from named(value) if isinstance(value, list) else [value]


def test_the_navigation_has_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    of_tests = {"tests/README.md", "tests/reference/README.md"}  # what only those who change the project read
    assert sorted(named(navigation)) == sorted({str(page.relative_to(ROOT)) for page in PAGES} - of_tests)


def test_the_pages_have_every_table_once() -> None:
    tables = tool("page_tables").tables()
    assert sorted(name for page in PAGES for name in SITE.MARK.findall(page.read_text())) == sorted(tables)
    for text in tables.values():
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert rows and {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {3, 4, 5, 6}
    links = {link for text in tables.values() for link in LINK.findall(text)}
    assert links and all(leads_somewhere(link, ROOT / "docs" / "commands.md") for link in links)
