"""What of megatron-core the package uses beyond its interface: every private name, and every name that it replaces.

The private ones are complete (the sources are searched), and each is there, with the parameters that are relied on, in
the megatron-core that is installed: a new version that renamed one fails here, by name, and not in a run.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1] / "megatron_fanformer"
INSTALLED = Version(megatron.core.__version__)
STANDARD = {"_replace", "_asdict", "_exit"}  # methods of named tuples and os, whatever megatron-core calls so


class Seam(NamedTuple):
    """A name, and why there is no way around it."""

    reason: str
    parameters: tuple[str, ...] = ()
    """Of a function: the names of its first ones."""
    since: str = "0.16"


PRIVATE = {
    "distributed.param_and_grad_buffer._coalescing_manager": Seam(
        "over gloo, GPU tensors go one bucket a call; torch's, by that name"
    ),
    "dist_checkpointing.strategies.filesystem_async._results_queue": Seam(
        "the writer's results come by a file; megatron-core starts a server process"
    ),
    "models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd": Seam(
        "a CPU turns pairs in one pass", ("t", "freqs", "rotary_interleaved")
    ),
    "models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd": Seam(
        "the same for packed sequences, all at once", ("t", "cu_seqlens", "freqs", "rotary_interleaved")
    ),
    "optimizer.distrib_optimizer.DistributedOptimizer._get_main_param_and_optimizer_states": Seam(
        "main weights and states by weight, for checkpoints by global names", ("self", "model_param")
    ),
    "tensor_parallel.random._get_share_storage": Seam(
        "it compiles an extension to put recomputed outputs in place", (), since="0.19"
    ),
    "tensor_parallel.random._set_cuda_rng_state": Seam(
        "it queues the state for CUDA's start, which never comes on a CPU", ("new_state", "device", "graph_safe")
    ),
}
REPLACED = {
    "distributed.param_and_grad_buffer.dist_all_gather_func": Seam("a group of one rank copies nothing"),
    "distributed.param_and_grad_buffer.dist_reduce_scatter_func": Seam("the same"),
    "optimizer.Adam": Seam("an optimizer of ours takes its place"),
    "optimizer.USING_PYTORCH_OPTIMIZER": Seam("and is called as torch's are"),
    "optimizer.clip_grads.l2_norm_impl": Seam("norms of large gradients are exact on a CPU"),
    "optimizer.distrib_optimizer.Adam": Seam("as optimizer.Adam"),
    "tensor_parallel.random.CheckpointWithoutOutput": Seam("without the Engine its `fp8` must be False, not None"),
}


SEAMS = {name: seam for name, seam in {**PRIVATE, **REPLACED}.items() if Version(seam.since) <= INSTALLED}


@pytest.mark.parametrize("name", SEAMS)
def test_each_is_what_it_was(name: str) -> None:
    reason, parameters, _ = SEAMS[name]
    owner, _, last = name.rpartition(".")
    assert hasattr(resolved(owner), last), f"megatron-core {INSTALLED} has no {name}: {reason}"
    if parameters:
        original = source_of(name)
        assert original is not None, f"megatron-core {INSTALLED} has no function {name}: {reason}"
        names = [argument.arg for argument in (*original.args.posonlyargs, *original.args.args)]
        assert tuple(names[: len(parameters)]) == parameters, f"{name} of megatron-core {INSTALLED} is another"


def resolved(name: str) -> Any:
    """A module, or a class in one."""
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ModuleNotFoundError:
        owner, _, last = name.rpartition(".")
        return getattr(resolved(owner), last)


def source_of(name: str) -> ast.FunctionDef | None:
    """A function as megatron-core's source has it, whatever stands in its place here."""
    owner, _, last = name.rpartition(".")
    tree = ast.parse(Path(inspect.getsourcefile(resolved(owner)) or "").read_text())
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == last), None)


# -- the search


def dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name of an expression that begins with something imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, imported)):
        return f"{owner}.{node.attr}"
    return None


def imports_of(tree: ast.AST) -> dict[str, str]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


@functools.cache
def sources() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def names_in_megatron() -> set[str]:
    """All private functions and attributes of megatron-core."""
    (folder,) = megatron.core.__path__
    text = "\n".join(path.read_text() for path in Path(folder).rglob("*.py"))
    return set(re.findall(r"(?:def |self\.)(_[a-z]\w*)", text)) - STANDARD


def used_privates() -> Iterator[str]:
    """Private names of megatron-core's modules, those that an object of its may have, and overridden methods."""
    own = {name for tree in sources() for name in assigned(tree)}
    for tree in sources():
        imported = imports_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and is_of_megatron(node, imported):
                methods = {
                    each.name for each in node.body if isinstance(each, ast.FunctionDef) and is_private(each.name)
                }
                yield from (f"megatron.core.{name}" for name in methods & names_in_megatron())
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
                yield from (name for name in names if name.startswith("megatron.core"))
            elif not isinstance(node, ast.Attribute | ast.Name):
                continue
            elif (name := dotted(node, imported)) and name.startswith("megatron.core"):
                if is_private(name.rpartition(".")[2]):
                    yield name
            elif not name and isinstance(node, ast.Attribute) and node.attr in names_in_megatron() - own:
                yield f"megatron.core.{node.attr}"


def is_of_megatron(node: ast.ClassDef, imported: dict[str, str]) -> bool:
    bases = [dotted(base, imported) or "" for base in node.bases]
    return node.name == "Stage" or any(base.startswith("megatron.core") for base in bases)


def assigned(tree: ast.AST) -> Iterator[str]:
    """Names of functions and of attributes that a file gives its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_no_other_private_name_is_used() -> None:
    listed = {*PRIVATE, *(name.rpartition(".")[2] for name in PRIVATE)}  # of an object the last name is seen
    used = {name.removeprefix("megatron.core.") for name in used_privates()}
    assert used <= listed
    assert {name.rpartition(".")[2] for name in used} == {name.rpartition(".")[2] for name in PRIVATE}
