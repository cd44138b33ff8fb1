"""The ceilings of the project's size: what is above one, and a commit that raises one."""

import json
import subprocess
import sys
from pathlib import Path

from tests.small_runs import ROOT


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def check(folder: Path, option: str = "--check") -> tuple[int, list[str]]:
    command = [sys.executable, str(folder / "tools" / "size.py"), option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


def test_sizes_and_their_ceilings_only_go_down(tmp_path: Path) -> None:
    files = {
        "tools/size.py": (ROOT / "tools" / "size.py").read_text(),
        "megatron_fanformer/a.py": "x = 1\n",
        "megatron_fanformer/ops/b.cpp": "int x;\nint y;\n",
        "docs/page.md": "three words here\n",
        "untracked.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init")
    git(tmp_path, "add", *[name for name in files if name != "untracked.py"])
    assert check(tmp_path, "--lower") == (0, [])
    ceilings = json.loads((tmp_path / "tools" / "ceilings.json").read_text())
    rooms = {"megatron_fanformer/ground": 1, "megatron_fanformer/ops": 2, "lines of megatron_fanformer": 3}
    assert rooms.items() <= ceilings.items() and ceilings["words of pages"] == 3 and ceilings["modules"] == 1
    git(tmp_path, "add", "tools")
    git(tmp_path, "commit", "--message", "first")
    assert check(tmp_path) == (0, [])
    (tmp_path / "megatron_fanformer/ops/b.cpp").write_text("int x;\n" * 3)
    code, lines = check(tmp_path)
    assert code == 1
    assert {line.split(" has ")[0] for line in lines} == {"megatron_fanformer/ops", "lines of megatron_fanformer"}
    (tmp_path / "tools" / "ceilings.json").write_text(json.dumps(ceilings | {name: 9 for name in rooms}))
    code, lines = check(tmp_path)
    raised = "tools/ceilings.json raises megatron_fanformer/ops from 2 to 9; a commit may only lower it"
    assert code == 1 and raised in lines
    git(tmp_path, "add", "tools")
    git(tmp_path, "commit", "--message", "raises them")
    assert check(tmp_path)[0] == 1  # by the commit before
