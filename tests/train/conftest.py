"""What several files of tests of the trainer share."""

import pytest

from tests.small_runs import write_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of random documents, for runs of `small_run`."""
    return write_tokens(tmp_path_factory.mktemp("tokens") / "random")
