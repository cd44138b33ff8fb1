"""The marks of transformers' own tests (test_transformers_common.py), which pytest must know before it imports them."""

import os
import re
from pathlib import Path

import pytest

MARKED = (
    "src/transformers/testing_utils.py",
    "tests/test_modeling_common.py",
    "tests/generation/test_utils.py",
    "tests/exporters/test_export.py",
)


def pytest_configure(config: pytest.Config) -> None:
    source = os.environ.get("TRANSFORMERS_SOURCE")
    files = [Path(source) / name for name in MARKED] if source is not None else []
    for path in files:
        text = path.read_text() if path.is_file() else ""
        for mark in set(re.findall(r"\bmark\.(\w+)", text)) - {"parametrize", "skip", "skipif", "xfail", "usefixtures"}:
            config.addinivalue_line("markers", f"{mark}: of transformers' tests")
