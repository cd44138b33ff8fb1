"""What is released: metadata that agree, an sdist and a wheel that are whole, files for those who contribute."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer import __version__
from tests.small_runs import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_RELEASED = shutil.ignore_patterns(
    ".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", "runs", "build", "dist"
)


def plain(requirement: str) -> str:
    """The name of a package, as registries compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


# -- metadata


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert all({"type", "title", "authors"} <= reference.keys() for reference in citation["references"])


def test_the_image_takes_its_versions_from_the_constraints() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert all((ROOT / file).is_file() for file in re.findall(r"--constraint (\S+)", text))
    installed = re.findall(r"pip install.*?(?=&&|\n\n|\n[A-Z])", text, re.DOTALL)
    assert all("--constraint" in command for command in installed)
    pinned = (ROOT / "constraints" / "py312.txt").read_text()
    (toolkit,) = re.findall(r"^cuda-toolkit==(\d+\.\d+)", pinned, re.MULTILINE)
    assert {found.rpartition(".")[0] for found in re.findall(r"nvidia/cuda:([\d.]+)", text)} == {toolkit}


def test_every_dependency_has_its_reason_in_the_contributors_table() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in page.splitlines() if row.startswith("| `")]
    assert all(reason.strip() for *_, reason in rows)
    listed = sorted(plain(name.strip("` ")) for names, *_ in rows for name in names.split(","))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert listed == sorted({plain(requirement) for group in groups for requirement in group})


# -- the sdist and the wheel


@pytest.mark.full
def test_the_sdist_and_the_wheel_are_whole(tmp_path: Path) -> None:
    """Built from a copy of this checkout."""
    released = tmp_path / "dist"
    shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_RELEASED)
    words = ["build", "--no-isolation", "--outdir", str(released), str(tmp_path / "source")]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = released.glob("*.tar.gz"), released.glob("*.whl")
    assert sdist.name == f"megatron_fanformer-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    ours = {path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()}
    skipped = re.compile(
        r"(\.git|\.venv[^/]*|[^/]*\.egg-info|runs|build|dist|\.\w+_cache)/|.*__pycache__/|\.git(ignore)?$"
    )
    assert {str(path) for path in ours if not skipped.match(str(path))} <= inside
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        metadata = archive.read(f"{wheel.name.split('-py3')[0]}.dist-info/METADATA").decode()
    package = {str(path) for path in ours if path.parts[0] == "megatron_fanformer" and "__pycache__" not in path.parts}
    assert package == {name for name in files if ".dist-info/" not in name}
    assert "megatron_fanformer/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert f"\nAuthor: {PROJECT['authors'][0]['name']}\n" in metadata
