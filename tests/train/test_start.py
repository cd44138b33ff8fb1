"""The start of a run of many ranks, for which one of them looks at the files."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.runtime import parallel
from megatron_fanformer.runtime.device import RankAddress
from megatron_fanformer.train import start
from megatron_fanformer.train.config import config_from_dict, load_config
from megatron_fanformer.train.preflight import RunStart, _resume_problems, find_start
from megatron_fanformer.train.samples import run_datasets
from tests.small_runs import RunOnRanks, small_run, write_config, write_tokens

SAMPLES = 8


def address(rank: int, world_size: int) -> RankAddress:
    return RankAddress(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_address="localhost",
        master_port=1,
    )


@contextmanager
def group(*_: Any) -> Iterator[str]:
    """In place of one of `run_rank`'s own: the ranks of a test have met already, or never do."""
    yield "cpu"


def drawn(config: Any, begun: RunStart) -> list[list[int]]:
    train = run_datasets(config, begun.data).train
    return [train[sample]["tokens"].tolist() for sample in range(SAMPLES)]


# -- on gloo ranks


def start_here(file: Path) -> dict[str, Any]:
    """Start this rank of a run as `train` does, its ranks having met; what it found, or its error."""
    from torch import distributed as dist

    found: dict[str, Any] = {}

    def train(config: Any, _grid: Any, begun: RunStart, _log: Any) -> None:
        found["samples"] = drawn(config, begun)

    with mock.patch.object(parallel, "process_group", group), mock.patch.object(start, "_train", train):
        try:
            start.run_rank(file, [], address(dist.get_rank(), dist.get_world_size()))
        except Exception as error:
            code, was_reported = getattr(error, "exit_code", None), getattr(error, "already_reported", None)
            found["error"] = (type(error).__name__, str(error), code, was_reported)
    return found


def test_ranks_get_the_same_samples(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    file = write_config(tmp_path / "config.yaml", small_run(prefix, tmp_path / "run", training={"micro_batch_size": 1}))
    ranks = run_on_ranks(4, start_here, file)
    config = load_config(file)
    assert [rank["samples"] for rank in ranks] == [drawn(config, find_start(config, None))] * 4


def cut_off_the_tokens(prefix: str) -> None:
    tokens = Path(prefix + ".bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("spoil", "kind", "message", "code"),
    [
        (cut_off_the_tokens, "CorruptError", "it is truncated", 3),
        (lambda prefix: (Path(prefix).parent / ".index_cache").touch(), "InputError", "cannot be written", 2),
    ],
    ids=["tokens", "cache"],
)
def test_what_the_main_rank_refuses_ends_every_rank_alike(
    run_on_ranks: RunOnRanks, tmp_path: Path, spoil: Callable[[str], None], kind: str, message: str, code: int
) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    spoil(prefix)
    values = small_run(prefix, tmp_path / "run", training={"micro_batch_size": 1})
    errors = [rank["error"] for rank in run_on_ranks(4, start_here, write_config(tmp_path / "c.yaml", values))]
    assert {error[:3] for error in errors} == {(kind, errors[0][1], code)}
    assert message in errors[0][1]
    assert [error[3] for error in errors] == [False, True, True, True]


def test_a_run_in_progress_keeps_ranks_that_another_program_started_out(
    run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    values = small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run", training={"micro_batch_size": 1})
    file = write_config(tmp_path / "config.yaml", values)
    with run_lock(tmp_path / "run"):
        errors = [rank["error"] for rank in run_on_ranks(2, start_here, file)]
    assert [(kind, code, was_reported) for kind, _, code, was_reported in errors] == [
        ("InUseError", 2, False),
        ("InUseError", 2, True),
    ]
    assert f"is in use by a run on {os.uname().nodename} (process {os.getpid()})" in errors[0][1]
    assert all("samples" in rank for rank in run_on_ranks(2, start_here, file))
    assert not (tmp_path / "run").exists()  # rank 0 let it go again


# -- a changed model


def test_the_remedy_for_other_rows_of_the_vocabulary_is_one(tmp_path: Path) -> None:
    """The padded size is no field: what it follows from is named, with a value that gives the checkpoint's rows."""
    values = small_run("tokens", tmp_path / "run")
    values["model"] |= {"vocab_size": 300, "make_vocab_size_divisible_by": 96}
    (checkpoint := tmp_path / "step-00000001").mkdir()
    write_config(checkpoint / run_folder.CONFIG, config_from_dict(values).as_dict())
    values["model"]["make_vocab_size_divisible_by"] = 64
    (problem,) = _resume_problems(checkpoint, config_from_dict(values), "train_iters")
    remedy = "was saved with 384; set model.make_vocab_size_divisible_by to 384"
    assert problem.startswith("model.padded_vocab_size is 320, but ") and problem.endswith(remedy)
    values["model"]["make_vocab_size_divisible_by"] = 384
    assert _resume_problems(checkpoint, config_from_dict(values), "train_iters") == []
