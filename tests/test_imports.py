"""The architecture's rules, read off the sources: who may import whom, and what may stand where.

`MAY_IMPORT` is the table of the rooms. Each rule is a function from a package's folder to the lines that
break it; each is tested on the package, on folders with a planted violation, and on one without any.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "megatron_fanformer"
ROOT = Path(__file__).parent.parent / PACKAGE

# A room may import itself, what stands here, and (hf excepted) the ground floor. An entry with a dot is one module.
ROOMS = {
    "ops": "",
    "runtime": "ops",
    "hf": "",
    # All ranks build a dataset together: what rank 0 refuses, every one must. `device` says where copies are kept.
    "data": "runtime.agreement runtime.device",
    "model": "ops runtime.layout runtime.parallel runtime.seeding",
    "prepare": "data runtime.device",
    "checkpoint": "runtime model.config data.tokenizer",
    "convert": "runtime data model checkpoint hf",
    "generate": "runtime data model checkpoint convert hf",
    "evaluate": "runtime data model checkpoint convert generate hf",
    "train": (
        "ops.matrices runtime data model plan.gradient_buffers plan.job plan.machines "
        "plan.matrix_updates checkpoint convert.recognition convert.megatron_names "
        "evaluate"
    ),
    "plan": "ops.matrices runtime data model checkpoint train",
    "parity": "runtime data model plan checkpoint train",
    "inspect": "runtime data model checkpoint convert train",
    "experiments": "runtime data model prepare plan checkpoint convert train generate evaluate hf",
    "demo": "runtime data model prepare checkpoint.run_lock checkpoint.run_folder convert train generate hf",
    "cli": (
        "runtime.device prepare.verb convert.verb generate.verb evaluate.verb train.verbs parity.verb "
        "plan.verb inspect.verb experiments demo.verb"
    ),
    "__main__": "cli",
    "configuration": "errors",
    "options": "configuration",
    "__init__": "",
}
GROUND = tuple(
    ["errors", "configuration", "options", "processes", "durable_files", "stores", "terminal", "pictures", "markdown"]
)
"""For everybody but hf, and the package itself, for its version."""
MAY_IMPORT = {room: tuple(ROOMS.get(room, "").split()) for room in (*GROUND, *ROOMS)}
MAX_LINES = 500

Rule = Callable[[Path], list[str]]


def sources(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every module under `root` with its syntax tree, in a fixed order; paths are relative to `root`."""
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root), _parsed(path, path.stat().st_mtime_ns)


@functools.cache
def _parsed(path: Path, _changed: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else path.stem


def imported_modules(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import anywhere in the file: top, function, relative or by name."""
    here = [PACKAGE, *path.parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from dict.fromkeys((node.lineno, _target(root, module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in {"import_module", "__import__"}:
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _target(root: Path, module: str, name: str) -> str:
    """What `from module import name` imports: the submodule `module.name` if there is one, else `module`."""
    if module.split(".")[0] != PACKAGE:
        return module
    candidate = root.joinpath(*module.split(".")[1:], name)
    return f"{module}.{name}" if candidate.is_dir() or candidate.with_suffix(".py").is_file() else module


def _last_name(node: ast.AST) -> str | None:
    """`c` of the expression `a.b.c`, and of the bare name `c`."""
    return getattr(node, "attr", getattr(node, "id", None))


def _inside_package(module: str) -> str | None:
    """`model.config` for `megatron_fanformer.model.config`; None for other packages' modules."""
    head, _, rest = module.partition(".")
    return rest if head == PACKAGE else None


def _covers(allowed: str, target: str) -> bool:
    return target == allowed or target.startswith(allowed + ".")


def rooms_are_in_the_table(root: Path) -> list[str]:
    return [f"{path}: no row in MAY_IMPORT for it" for path, _ in sources(root) if room_of(path) not in MAY_IMPORT]


def imports_follow_the_table(root: Path) -> list[str]:
    found = []
    for path, tree in sources(root):
        room = room_of(path)
        shared = () if room == "hf" else GROUND
        allowed = (room, *MAY_IMPORT.get(room, ()), *shared)
        for line, module in imported_modules(root, path, tree):
            target = _inside_package(module)
            if target is None or (target == "" and room != "hf"):
                continue
            if not any(_covers(entry, target) for entry in allowed):
                found.append(f"{path}:{line}: {room} imports {module}")
    return found


def files_import_in_no_circle(root: Path) -> list[str]:
    """One line a circle; imports in functions and those for types alone count, too.

    A placement may import late the modules that it builds, which read it.
    """
    read = {
        path: [
            found
            for line, module in imported_modules(root, path, tree)
            if (found := _file_of(root, _inside_package(module))) is not None
            and not (path.stem == "placements" and _is_late(tree, line))
        ]
        for path, tree in sources(root)
    }
    found = []
    while True:
        try:
            TopologicalSorter(read).prepare()
        except CycleError as error:
            imported, importer, *_ = circle = error.args[1]
            read[importer].remove(imported)  # to find the others
            found.append(f"{min(circle)}: {' is imported by '.join(map(str, circle))}")
        else:
            return found


def _is_late(tree: ast.Module, line: int) -> bool:
    """Return whether a line is in a function, or under `if TYPE_CHECKING`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.If))
    return any(each.lineno <= line <= (each.end_lineno or 0) for each in blocks)


def _file_of(root: Path, module: str | None) -> Path | None:
    """Return the file of `model.config`, relative to `root`; None for what is not of the package."""
    if module is None:
        return None
    path = Path(*module.split(".")) if module else Path()
    candidates = (path / "__init__.py", path.with_suffix(".py") if module else path)
    return next((file for file in candidates if (root / file).is_file()), None)


def hf_stands_alone(root: Path) -> list[str]:
    """Its files are copied into exports, where nothing but torch and transformers is there for sure."""
    available = {*sys.stdlib_module_names, "torch", "transformers"}
    found = []
    for path, tree in sources(root):
        relative = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        found += [
            f"{path}:{line}: imports {module}, not torch, transformers or (relatively) a neighbour"
            for line, module in imported_modules(root, path, tree)
            if room_of(path) == "hf" and module.split(".")[0] not in available and line not in relative
        ]
    return found


READ_THE_ENVIRONMENT = (Path("runtime/device.py"), Path("runtime/environment.py"))


def environment_is_read_in_two_modules(root: Path) -> list[str]:
    """Setting or deleting one variable is no reading."""
    found = []
    for path, tree in sources(root):
        if path in READ_THE_ENVIRONMENT:
            continue
        written = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        }
        for node in ast.walk(tree):
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            names = [alias.name for alias in node.names] if imported else [_last_name(node)]
            if {"environ", "environb", "getenv", "getenvb"}.intersection(names) and id(node) not in written:
                found.append(f"{path}:{node.lineno}: reads the environment")
    return found


def files_are_short(root: Path) -> list[str]:
    counts = ((path, len((root / path).read_text(encoding="utf-8").splitlines())) for path, _ in sources(root))
    return [f"{path}: {count} lines, over {MAX_LINES}" for path, count in counts if count > MAX_LINES]


def model_chooses_no_device(root: Path) -> list[str]:
    """Neither torch.cuda nor the string "cuda"; docstrings may speak of it."""
    found = []
    for path, tree in sources(root):
        if room_of(path) != "model":
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else None
            named = _last_name(node) == "cuda"
            if named or (isinstance(text, str) and re.search(r"\bcuda\b", text)):
                found.append(f"{path}:{node.lineno}: names cuda")
    return found


MODEL_CLASSES = {"GPTModel": Path("model/stages.py"), "HybridModel": Path("model/hybrid_spec.py")}


def stages_alone_name_megatrons_models(root: Path) -> list[str]:
    found = []
    for path, tree in sources(root):
        for node in ast.walk(tree):
            name = str(node.name if isinstance(node, ast.alias) else _last_name(node))
            if name in MODEL_CLASSES and path != MODEL_CLASSES[name]:
                found.append(f"{path}:{node.lineno}: names {name}")
    return found


# (rule, file of a package that breaks it, its text)
PLANTED: list[tuple[Rule, str, str]] = [
    (rooms_are_in_the_table, "attic/box.py", ""),
    (imports_follow_the_table, "data/a.py", "def f():\n    from ..model import config"),
    (imports_follow_the_table, "prepare/a.py", "import importlib\nimportlib.import_module('megatron_fanformer.model')"),
    (files_import_in_no_circle, "hf/configuration_fanformer.py", "from . import modeling_fanformer"),
    (hf_stands_alone, "hf/a.py", "import safetensors"),
    (environment_is_read_in_two_modules, "train/a.py", "import os\nrank = os.environ['RANK']"),
    (files_are_short, "data/a.py", "x = 1\n" * (MAX_LINES + 1)),
    (model_chooses_no_device, "model/a.py", "import torch\nx = torch.zeros(1, device='cuda:0')"),
    (stages_alone_name_megatrons_models, "train/a.py", "from megatron.core.models.gpt import GPTModel as Model"),
]
# (file, its text) that break no rule
INNOCENT = [
    ("hf/modeling_fanformer.py", "import torch\nfrom .configuration_fanformer import FANformerConfig"),
    ("checkpoint/save.py", f"from {PACKAGE}.model import config\nfrom {PACKAGE}.errors import InputError"),
    ("model/config.py", '"""Runs on cuda or cpu."""'),
    ("model/stages.py", "from megatron.core.models.gpt import GPTModel"),
    ("runtime/device.py", "import os\nrank = os.environ.get('RANK')\nos.environ['OMP_NUM_THREADS'] = '1'"),
]


@pytest.mark.parametrize("rule", list(dict.fromkeys(rule for rule, _, _ in PLANTED)), ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_reported(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    for file, content in [*INNOCENT, (path, text)]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content, encoding="utf-8")
    assert [line.split(":")[0] for line in rule(tmp_path)] == [path]
