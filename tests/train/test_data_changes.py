"""A run goes on with the data that it began with, or says what changed."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import run_folder, stored_files
from megatron_fanformer.checkpoint.stored_files import SavedProgress
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.inspect.checkpoint import describe_run
from megatron_fanformer.inspect.step import inspect_step
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from megatron_fanformer.train.preflight import RunStart, find_start
from tests.data.token_making import write_manifest
from tests.small_runs import SEQ_LENGTH, RunOnRanks, small_run, write_tokens
from tests.train.test_trainer import train

Values = dict[str, dict[str, Any]]

STEP_TOKENS = 4 * SEQ_LENGTH


@pytest.fixture(scope="module")
def begun(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Values:
    """A run of 6 steps, after its 4th."""
    folder = tmp_path_factory.mktemp("begun")
    training = {"train_iters": 6, "exit_interval": 4}
    tokens = write_tokens(folder / "tokens")
    values = small_run(tokens, folder / "run", training=training, schedule={"lr_warmup_iters": 1})
    run_on_ranks(1, train, values)
    return values


@pytest.fixture
def half(begun: Values, tmp_path: Path) -> Values:
    """A copy of it, with its data."""
    folder = Path(begun["training"]["run_dir"]).parent
    shutil.copytree(folder, tmp_path / "copy")
    values = copy.deepcopy(begun)
    values["training"]["run_dir"] = str(tmp_path / "copy" / "run")
    values["data"]["train_data"] = [str(tmp_path / "copy" / "tokens")]
    return values


def start(values: Values, **data: Any) -> RunStart:
    return find_start(config_from_dict({**values, "data": {**values["data"], **data}}), None)


def tokens_read(checkpoint: dict[str, Any]) -> dict[str, float]:
    """By source, as a checkpoint has them."""
    return {name: own["tokens"] for name, own in checkpoint["sources"].items()}


def replace_tokens(values: Values) -> None:
    """Another .bin file under the same name, of the same size."""
    file = Path(values["data"]["train_data"][0] + ".bin")
    content = file.read_bytes()
    file.write_bytes(content[200:] + content[:200])


def test_a_copy_of_the_data_is_the_same_data(begun: Values, half: Values, run_on_ranks: RunOnRanks) -> None:
    """Which the run has read by both names."""
    assert start(half).identity.changes == []
    run_on_ranks(1, train, half)
    (checkpoint,) = describe_run(Path(half["training"]["run_dir"]))["parts"]
    (former,), (present,) = begun["data"]["train_data"], half["data"]["train_data"]
    assert tokens_read(checkpoint) == {present: 2 * STEP_TOKENS, former: 4 * STEP_TOKENS}


def test_a_replaced_file_is_refused_or_its_change_recorded(
    begun: Values, half: Values, run_on_ranks: RunOnRanks
) -> None:
    (former,), (present,) = begun["data"]["train_data"], half["data"]["train_data"]
    replace_tokens(half)
    with pytest.raises(InputError, match=r"data\.train_data is not what the run in .* \(other files, "):
        start(half)
    allowed = start(half, allow_change=["train"])
    assert [(change.step, change.name) for change in allowed.identity.changes] == [(4, "train")]
    half["data"]["allow_change"] = ["train"]
    run_on_ranks(1, train, half)
    del half["data"]["allow_change"]
    assert start(half).identity.changes == allowed.identity.changes  # accepted once and for all, and not forgotten
    run = Path(half["training"]["run_dir"])
    for path in (run, run_folder.latest_checkpoint(run)):  # whose configuration has the new data
        with pytest.raises(InputError, match=r"after step 4 \(.*other files.* name a checkpoint from before"):
            inspect_step(str(path), 4)
        inspect_step(str(path), 5)
    inspect_step(str(run / "config.yaml"), 4)
    inspect_step(str(run / "checkpoints" / run_folder.checkpoint_name(4)), 4)
    (checkpoint,) = describe_run(run)["parts"]
    assert checkpoint["data"] == allowed.identity.as_plain()
    # The former data stay those of the steps before, by their own name, after one more start, too.
    assert tokens_read(checkpoint) == {present: 2 * STEP_TOKENS, former: 4 * STEP_TOKENS}
    half["training"]["train_iters"] = 7
    run_on_ranks(1, train, half)
    (checkpoint,) = describe_run(run)["parts"]
    assert tokens_read(checkpoint) == {present: 3 * STEP_TOKENS, former: 4 * STEP_TOKENS}
    last = read_metrics(run)[-1]
    assert {name: last[name] for name in last if name.startswith("data/") and name.endswith("tokens")} == {
        "data/tokens/tokens": 3 * STEP_TOKENS
    }


def test_training_data_of_another_tokenizer_are_told(
    tmp_path: Path, small_tokenizer_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which goes into every checkpoint."""
    prefix = write_tokens(tmp_path / "tokens")
    values = small_run(
        prefix, tmp_path / "run", model={"vocab_size": 600}, data={"tokenizer": str(small_tokenizer_file)}
    )
    write_manifest(prefix, dtype="uint16", max_token_id=0)
    manifest = Path(f"{prefix}.manifest.json")
    text = manifest.read_text()
    for digest, warning in (
        ("", ""),
        (sha256_of(small_tokenizer_file), ""),
        ("f" * 64, "training data were made with another tokenizer (SHA-256 ffffffffffff…) than data.tokenizer"),
    ):
        manifest.write_text(text.replace('"tokenizer.json",\n    "sha256": ""', f'"", "sha256": "{digest}"'))
        start(values)
        assert warning in caplog.text and ("made with" in caplog.text) == bool(warning)


def test_a_checkpoint_that_records_no_data_is_gone_on_from_with_a_notice(
    half: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_tokens(half)
    monkeypatch.setattr(stored_files, "saved_progress", lambda *_: SavedProgress(4, 16))
    with caplog.at_level(logging.INFO, "megatron_fanformer"):
        assert start(half).resumed is not None
    assert f"{run_folder.checkpoint_name(4)} does not say which data" in caplog.text
