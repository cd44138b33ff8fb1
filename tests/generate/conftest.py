"""What the tests of generation share: a checkpoint with a tokenizer, and its export."""

from pathlib import Path

import pytest

from tests.generate.making import write_checkpoint, write_export, write_tokenizer
from tests.small_runs import RunOnRanks


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path, run_on_ranks: RunOnRanks) -> Path:
    """A run's folder with a checkpoint of `fanformer-tied`."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run_on_ranks(1, write_checkpoint, run, "fanformer-tied", tokenizer_file)
    return run


@pytest.fixture(scope="session")
def exported_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """The same model as transformers opens it."""
    folder = tmp_path_factory.mktemp("exports") / "model"
    write_export(folder, "fanformer-tied", tokenizer_file)
    return folder
