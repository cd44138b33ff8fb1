"""A run's folder and data, changed under it: by another run, by a kill, by whoever moves or cuts off files."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.cli import main
from megatron_fanformer.demo.demo import MARK
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

ENDLESS = {"train_iters": 100_000}


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens")


def last_step(run: Path) -> int:
    try:
        return max((entry["step"] for entry in read_metrics(run)), default=0)
    except FileNotFoundError:
        return 0


@pytest.mark.full  # locks by themselves: the next test
def test_one_run_at_a_time_has_a_folder_and_a_killed_one_is_gone_on_with_at_once(
    tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run is then left without its folder."""
    run = tmp_path / "run"
    values = small_run(
        tokens,
        run,
        training=ENDLESS,
        checkpoint={"save_interval": 50, "keep": 2},
        data={"allow_change": ["train"]},  # past one epoch
    )
    command = ("train", "--config", str(write_config(tmp_path / "config.yaml", values)))
    first = start_command(*command)
    wait_until(lambda: run_folder.latest_checkpoint(run), first)
    assert main(list(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run} is in use by a run on {os.uname().nodename} (process {first.pid}) since 2" in line
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    saved = run_folder.latest_checkpoint(run)
    assert saved is not None and (run / run_folder.LOCK).exists()
    left, reached = (run / run_folder.METRICS).stat().st_ino, int(saved.name.removeprefix("step-"))

    second = start_command(*command)
    wait_until(lambda: (run / run_folder.METRICS).stat().st_ino != left and last_step(run) > reached, second)
    run.rename(tmp_path / "renamed")
    output, errors = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 1
    assert f"continuing after step {reached} of" in output
    (line,) = errors.splitlines()
    assert f"{run} was removed or renamed during the run" in line
    assert not run.exists()


def test_nothing_is_put_among_the_checkpoints_of_a_run_in_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "demo" / "run"
    destination = run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(1)
    convert = ["convert", str(ROOT / "tests" / "reference" / "atl"), str(destination), "--to", "megatron"]
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / MARK).touch()
    with run_lock(run):
        for command in (convert, ["demo", "--output", str(tmp_path / "demo")]):
            assert main(command) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{run} is in use by a run on" in line
        assert not destination.parent.exists()


def put_foreign_ids(file: Path) -> None:
    """Every seventh id another tokenizer's, in place."""
    ids = np.memmap(file, np.uint16, mode="r+")
    ids[::7] = 60_000
    ids.flush()


def spoil_during_training(values: dict[str, Any], file: Path, spoil: Callable[[Path], None]) -> tuple[int, str]:
    """Train, and spoil a file after two steps; exit code and message of the error that follows."""
    import torch.distributed as dist

    from megatron_fanformer.train.trainer import Trainer

    config = config_from_dict(values)
    with rank_grid(config.parallel, "cpu") as grid:
        trainer = Trainer(config, grid)
        try:
            trainer.take_step()
            trainer.take_step()
            if grid.rank == 0:
                spoil(file)
            dist.barrier()  # else another rank may have read its next samples before
            trainer.train()
        except FanformerError as error:
            return error.exit_code, str(error)
        finally:
            trainer.close()
    return 0, ""


def test_foreign_ids_end_a_run_that_is_tensor_parallel(
    run_on_ranks: Callable[..., list[Any]], tmp_path: Path, tokens: str
) -> None:
    """Without a check a rank takes them for ids of the other's part of the vocabulary, and trains on."""
    values = small_run(tokens, tmp_path / "run", parallel={"tensor_model_parallel_size": 2})
    file = Path(tokens + ".bin")
    for code, message in run_on_ranks(2, spoil_during_training, values, file, put_foreign_ids):
        assert code == 3 and message.startswith(f"{file} holds token id 60000 (token ")
        assert "outside the vocabulary of 100; train with the tokenizer that made the tokens" in message
