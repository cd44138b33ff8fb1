"""A run's folder and data, changed under it: by another run, by a kill, by whoever moves or cuts off files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.cli import main
from megatron_fanformer.demo.demo import MARK
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.config import config_from_dict
from tests.small_runs import small_run, write_tokens


def test_the_demo_leaves_a_run_in_progress_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / MARK).touch()
    run = tmp_path / "demo" / "run"
    with run_lock(run):
        assert main(["demo", "--output", str(tmp_path / "demo")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{run} is in use by a run on" in line


def put_foreign_ids_during_training(values: dict[str, Any], file: Path) -> tuple[int, str]:
    """Train, and after two steps make every seventh id another tokenizer's; exit code and message of the error."""
    import torch.distributed as dist

    from megatron_fanformer.train.trainer import Trainer

    config = config_from_dict(values)
    with rank_grid(config.parallel, "cpu") as grid:
        trainer = Trainer(config, grid)
        try:
            trainer.take_step()
            trainer.take_step()
            if grid.rank == 0:
                ids = np.memmap(file, np.uint16, mode="r+")
                ids[::7] = 60_000
                ids.flush()
            dist.barrier()  # else another rank may have read its next samples before
            trainer.train()
        except FanformerError as error:
            return error.exit_code, str(error)
        finally:
            trainer.close()
    return 0, ""


def test_foreign_ids_end_a_run_that_is_tensor_parallel(run_on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Without a check a rank takes them for ids of the other's part of the vocabulary, and trains on."""
    tokens = write_tokens(tmp_path / "tokens")
    values = small_run(tokens, tmp_path / "run", parallel={"tensor_model_parallel_size": 2})
    file = Path(tokens + ".bin")
    for code, message in run_on_ranks(2, put_foreign_ids_during_training, values, file):
        assert code == 3 and message.startswith(f"{file} holds token id 60000 (token ")
        assert "outside the vocabulary of 100; train with the tokenizer that made the tokens" in message
