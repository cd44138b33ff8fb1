"""Text of installed packages, on made-up site folders: which licenses are free, what is taken, and what is held out."""

import gzip
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.small_runs import ROOT

TEXT = "def reads_lines(path):\n    return path.read_text().splitlines()\n\n\n"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import installed_text

    yield installed_text


def metadata(**fields: "str | list[str]") -> Message:
    found = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            found[name.replace("_", "-")] = value
    return found


def install(site: Path, name: str, files: dict[str, str], **fields: "str | list[str]") -> None:
    """A package with its metadata and the list of its files, as pip leaves them."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    stated = metadata(Metadata_Version="2.4", Name=name, Version="1.0", **fields)
    (info / "METADATA").write_text(stated.as_string())
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in [*files, f"{info.name}/METADATA"]))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")]


def test_only_a_free_license_that_is_stated_counts(tool: Any) -> None:
    free = "Apache-2.0 WITH LLVM-exception AND MIT"
    classifiers = ["License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"]
    assert tool.license_of(metadata(License_Expression=free))[0] == free
    assert tool.license_of(metadata(License="Apache License, Version 2.0"))[0] == "Apache License, Version 2.0"
    for fields in ({"License_Expression": "MIT AND GPL-3.0-only"}, {"Classifier": classifiers}, {}):
        assert tool.license_of(metadata(**fields))[0] is None


def test_the_folder_of_a_made_up_site(tool: Any, tmp_path: Path) -> None:
    site, names = tmp_path / "site", [f"package-{number}" for number in range(40)]
    for name in names:
        files = {f"{name}/one.py": f"# {name}\n{TEXT}", f"{name}/read.md": f"# {name}\n\n{TEXT}"}
        files |= {f"{name}/same.py": TEXT, f"{name}/_vendor/copy.py": f"# copy in {name}\n{TEXT}"}
        files |= {f"{name}/table.py": f"# {name}\n{'1, ' * 2000}", f"{name}/library.so": TEXT + name}
        install(site, name, files, License_Expression="MIT")
    install(site, "closed", {"closed/one.py": f"# closed\n{TEXT}"}, License="Proprietary")
    manifest = tool.write_text(tmp_path / "text", sites=[site])
    trained = [line for file in sorted((tmp_path / "text").glob("train-*.jsonl.gz")) for line in lines(file)]
    held_out = lines(tmp_path / "text" / "held-out.jsonl.gz")
    chosen = tool.held_out(names)
    assert 1 <= len(chosen) < 10 and {line["source"] for line in held_out} == chosen
    assert {line["source"] for line in trained} == set(names) - chosen
    assert len(trained) + len(held_out) == 2 * len(names) + 1  # what all have alike is taken once
    taken = {Path(line["id"]).name for line in trained + held_out}
    assert taken == {"one.py", "read.md", "same.py"}
    assert manifest == json.loads((tmp_path / "text" / "manifest.json").read_text())
    assert manifest["left_out"] == {"closed": "license: Proprietary"}
    assert manifest["train"]["bytes"] == sum(len(line["text"].encode()) for line in trained)
    assert {each["license"] for each in manifest["packages"]} == {"MIT"}
