"""Checkpoints of other versions: what later ones add is left out, and what cannot be read is not called damaged.

`python -m tests.checkpoint.test_megatron_versions` writes the sample of the installed megatron-core.
"""

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.checkpoint import megatron_versions, run_folder, stored_files
from megatron_fanformer.checkpoint.data_files import UnreadableError
from megatron_fanformer.checkpoint.manifest import VERSIONS, versions
from megatron_fanformer.checkpoint.stored_files import Table, read_table, tensors_of
from megatron_fanformer.configuration import read_plain_values
from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens
from tests.train.test_trainer import train

SAMPLES = ROOT / "tests" / "samples" / "checkpoints"
STEP = 2
RunOnRanks = Callable[..., list[Any]]
SAME = 1e-5  # of a loss: the samples were written on a CPU with AVX-512, whose sums may be in another order


@pytest.fixture
def values(run_on_ranks: RunOnRanks, tmp_path: Path) -> dict[str, Any]:
    """Of a run of two ranks with two checkpoints, that has a step more to take."""
    values = small_run(
        write_tokens(tmp_path / "tokens"),
        tmp_path / "run",
        parallel={"data_parallel_size": 2},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": 2},
        checkpoint={"save_interval": 1},
    )
    run_on_ranks(2, train, values)
    values["training"]["train_iters"] = 3
    return values


def checkpoints(values: dict[str, Any]) -> Path:
    return run_dir(values) / run_folder.CHECKPOINTS


def resume_from_a_later_torchs_table(values: dict[str, Any]) -> None:
    def table_with_strides(checkpoint: Path) -> Table:
        table = read_table(checkpoint)
        for stored in tensors_of(table).values():
            stored.properties.strides = (1,)  # type: ignore[attr-defined]
        return table

    with mock.patch.object(stored_files, "read_table", table_with_strides):
        train(values)


def test_properties_of_tensors_that_later_versions_add_are_left_out(
    run_on_ranks: RunOnRanks, values: dict[str, Any]
) -> None:
    run_on_ranks(2, resume_from_a_later_torchs_table, values)
    last = checkpoints(values) / run_folder.checkpoint_name(3)
    assert run_folder.latest_checkpoint(run_dir(values)) == last


def error_of_a_library_that_fails(values: dict[str, Any]) -> str:
    failing = mock.Mock(side_effect=TypeError("empty() got an unexpected keyword argument 'strides'"))
    with (
        mock.patch.object(megatron_versions.dist_checkpointing, "load", failing),
        pytest.raises(UnreadableError) as caught,
    ):
        train(values)
    return str(caught.value)


def test_a_library_that_fails_on_sound_files_is_not_damage(run_on_ranks: RunOnRanks, values: dict[str, Any]) -> None:
    """No earlier checkpoint is taken, where it would fail as well, and none is set aside."""
    newest = checkpoints(values) / run_folder.checkpoint_name(2)
    assert read_plain_values(newest / VERSIONS) == versions()
    before = sorted(path.name for path in checkpoints(values).iterdir())
    for message in run_on_ranks(2, error_of_a_library_that_fails, values):
        assert "cannot be read: empty() got an unexpected keyword argument 'strides' (torch 2." in message
    assert sorted(path.name for path in checkpoints(values).iterdir()) == before
    assert run_folder.latest_checkpoint(checkpoints(values).parent) == newest


def run_values(folder: Path, steps: int) -> dict[str, Any]:
    """A run of two thousand weights on tokens that are the same wherever it is, in a folder."""
    return small_run(
        write_tokens(folder / "tokens", vocab_size=32),
        folder / "run",
        model={"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32},
        schedule={"lr_warmup_iters": 1, "lr_decay_iters": 4},
        training={"train_iters": steps},
        checkpoint={"save_interval": STEP},
    )


@pytest.mark.parametrize("sample", [path.name for path in sorted(SAMPLES.iterdir())])
def test_a_run_of_either_megatron_core_goes_on(sample: str, run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    """From its weights, optimizer and place in the data, as a run does that never stopped."""
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole, resumed = (run_values(tmp_path / name, 2 * STEP) for name in ("whole", "resumed"))
    run_on_ranks(1, train, whole)
    shutil.copytree(SAMPLES / sample, checkpoints(resumed) / run_folder.checkpoint_name(STEP))
    run_on_ranks(1, train, resumed)
    expected, found = ({m["step"]: m["loss"] for m in read_metrics(run_dir(values))} for values in (whole, resumed))
    assert list(found) == [STEP + 1, 2 * STEP]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=SAME)


def run_dir(values: dict[str, Any]) -> Path:
    return Path(values["training"]["run_dir"])


def main() -> None:
    """Write the sample."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder) / "run.yaml", run_values(Path(folder), STEP))
        process = start_command("train", "--config", str(config))
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        (checkpoint,) = (Path(folder) / "run" / "checkpoints").glob("step-*")
        major, minor, *_ = version("megatron-core").split(".")
        shutil.copytree(checkpoint, SAMPLES / f"megatron-core-{major}.{minor}", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
