"""What mkdocs.yml builds the site of: the repository's pages at their own paths, so that every link between them holds.

mkdocs takes its pages from one folder, docs/, and ours link to others beside it. Here all of them become pages or files
of the site, README.md its front page.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE_DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "tests/README.md",
    "tests/reference/README.md",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files of docs/ and of the theme; returns those of the site."""
    found = [file for file in files if file.src_dir == config.docs_dir]
    for file in found:
        files.remove(file)
    for path in (*BESIDE_DOCS, *(f"docs/{file.src_uri}" for file in found)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
