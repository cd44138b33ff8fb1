"""With this folder on PYTHONPATH every Python process has the stand-in, those that it starts too.

Python imports this module when it starts. torch reports a GPU as soon as it was imported; the rest, which takes
seconds, is installed by the first import of megatron-core or of the Engine. A process that hides GPUs has none of it.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
ENGINE_MODULES = ("megatron.core", "transformer_engine")


class StandInFinder:
    """Finds the modules at whose import the stand-in is installed, each once."""

    def __init__(self) -> None:
        self._awaited = {"torch", *ENGINE_MODULES}

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """What Python's own finder finds, with another loading."""
        if name not in self._awaited or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            (self._load_torch if name == "torch" else self._load_engine)(spec.loader)
        return spec

    def _load_torch(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_report(module: ModuleType) -> None:
            self._awaited.discard("torch")
            execute(module)
            _installing().report_a_gpu()

        loader.exec_module = execute_and_report

    def _load_engine(self, loader: Any) -> None:
        """Both modules are imported by the installing: it has to patch them before and after."""

        def installed(spec: ModuleSpec) -> ModuleType:
            self._awaited.difference_update(ENGINE_MODULES)
            _installing().install_engine()
            return sys.modules[spec.name]

        loader.create_module = installed
        loader.exec_module = lambda _module: None  # it is executed already


def _installing() -> Any:
    if ROOT not in sys.path:
        sys.path.append(ROOT)
    import torch  # noqa: F401  # whose import asks for the same module: it must not be half imported then

    from tests.engine_on_cpu import installing

    return installing


sys.meta_path.insert(0, StandInFinder())  # type: ignore[arg-type]
