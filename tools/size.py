"""Counts what git tracks: lines of Python and C++ by room, modules, statements, words of pages; holds them to ceilings.

python tools/size.py            # the table
python tools/size.py --check    # fail above a ceiling, or where the last commit or the working tree raises one
python tools/size.py --lower    # lower the ceilings to what is there
"""

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = "tools/ceilings.json"
PACKAGE, CODE, PAGE = "megatron_fanformer", (".py", ".cpp", ".h"), ".md"


def main(arguments: list[str]) -> int:
    """Print the table, check it or lower the ceilings; returns the exit code."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        print("this is no git checkout: sizes are not counted", file=sys.stderr)
        return 0
    sizes = count(ROOT)
    ceilings: dict[str, int] = json.loads((ROOT / CEILINGS).read_text()) if (ROOT / CEILINGS).is_file() else {}
    if arguments == ["--lower"]:
        ceilings = {name: min(size, ceilings.get(name, size)) for name, size in sizes.items()}
        (ROOT / CEILINGS).write_text(json.dumps(ceilings, indent=1) + "\n")
        return 0
    if arguments == ["--check"]:
        lines = problems(sizes, ceilings, *filter(None, (_committed("HEAD"), _committed("HEAD^"))))
        print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)
        return 1 if lines else 0
    for name, size in sizes.items():
        print(f"{name:24}{size:9,}{ceilings.get(name, 0):9,}")
    return 0


def count(root: Path) -> dict[str, int]:
    """Return lines by room, and the totals: lines, modules and statements of the package, words of pages."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    lines, totals = Counter[str](), Counter[str]()
    for name in filter(None, tracked.split("\0")):
        path = Path(name)
        if path.suffix not in (*CODE, PAGE) or not (root / path).is_file():
            continue
        text = (root / path).read_text(encoding="utf-8")
        if path.suffix == PAGE:
            totals["words of pages"] += len(text.split())
        elif path.parts[0] == PACKAGE:
            room = path.parts[1] if len(path.parts) > 2 else "ground"
            lines[f"{PACKAGE}/{room}"] += len(text.splitlines())
            totals[f"lines of {PACKAGE}"] += len(text.splitlines())
            totals["modules"] += path.suffix == ".py"
            totals["statements"] += path.suffix == ".py" and sum(
                isinstance(n, ast.stmt) for n in ast.walk(ast.parse(text))
            )
        elif path.parts[0] in ("tests", "tools"):
            lines[path.parts[0]] += len(text.splitlines())
    return dict(sorted(lines.items())) | dict(sorted(totals.items()))


def problems(sizes: dict[str, int], ceilings: dict[str, int], *earlier: dict[str, int]) -> list[str]:
    """Return one line for each size above its ceiling, and for each ceiling above that of an earlier commit."""
    lines = [
        f"{name} has {size:,}, and its ceiling is {ceilings.get(name, 0):,}; make it smaller"
        for name, size in sizes.items()
        if size > ceilings.get(name, 0)
    ]
    return lines + [
        f"{CEILINGS} raises {name} from {before[name]:,} to {ceiling:,}; a commit may only lower it"
        for before in earlier
        for name, ceiling in ceilings.items()
        if ceiling > before.get(name, ceiling)
    ]


def _committed(commit: str) -> dict[str, int] | None:
    """Return the ceilings in a commit, or None if the commit has none."""
    shown = subprocess.run(
        ["git", "show", f"{commit}:{CEILINGS}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return json.loads(shown.stdout) if shown.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
