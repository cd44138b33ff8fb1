"""The hooks of mkdocs.yml: pages keep their paths in the repository, so that every link works on the site.

mkdocs takes pages from one folder, docs/. Our pages link to files outside docs/, too; these hooks add them to the site.
README.md is the front page. The tables that tools/page_tables.py rendered replace their marks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
TARGET = re.compile(r"\]\(([^)#\s]+)")  # of a link or a picture, without its anchor
TABLES = ROOT / "build" / "page_tables.json"
MARK = re.compile(r"<!-- table: (.+?) -->")


def site_files() -> list[str]:
    """Return the paths, from the root, of README.md, of docs/, and of all files that their pages link to."""
    paths = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file())]
    for page in paths:  # the loop visits the files that it appends, too
        targets = TARGET.findall(page.read_text(encoding="utf-8")) if page.suffix == ".md" else []
        for path in ((page.parent / target).resolve() for target in targets):
            if path.is_file() and path not in paths:
                paths.append(path)
    return [str(path.relative_to(ROOT)) for path in paths]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the site's files: those of the theme, and `site_files` in place of those in docs/."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in site_files():
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text with the tables in place of their marks."""
    tables = json.loads(TABLES.read_text(encoding="utf-8"))
    return MARK.sub(lambda mark: f"\n{tables[mark[1]]}\n", markdown)
