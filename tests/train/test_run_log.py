"""A run's log on the terminal and in files."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.device import NOTICES, quieten_libraries
from megatron_fanformer.train.run_log import run_log
from tests.generate.making import write_tokenizer
from tests.small_runs import VOCAB_SIZE, RunOnRanks, small_run, write_config, write_tokens
from tests.train.test_start import start_here

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) rank \d+ [\w.]+: .+")

logger = logging.getLogger("megatron_fanformer.train.some_module")


def test_the_file_has_everything_and_the_terminal_what_is_for_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_log(rank=0) as log:
        log.write_to(str(tmp_path / "new"))
        logger.info("saved [bold]this[/bold] :smile:")
        logger.debug("took 3 s")
    assert capsys.readouterr() == ("saved [bold]this[/bold] :smile:\n", "")
    lines = (tmp_path / "new" / "rank-00000.log").read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert [line.split(" rank 0 megatron_fanformer.train.some_module: ")[1] for line in lines] == [
        "saved [bold]this[/bold] :smile:",
        "took 3 s",
    ]


def test_warnings_reach_the_file_and_the_terminal_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), run_log(rank=0) as log:
        warnings.simplefilter("always")
        quieten_libraries()
        log.write_to(str(tmp_path))
        for _ in range(3):
            warnings.warn("this is slow", RuntimeWarning, stacklevel=1)
            warnings.warn(NOTICES[0], stacklevel=1)
    out, err = capsys.readouterr()
    assert (out.count("RuntimeWarning: this is slow"), err) == (1, "")
    text = (tmp_path / "rank-00000.log").read_text()
    assert text.count("WARNING rank 0 py.warnings:") == text.count("RuntimeWarning: this is slow") == 3
    assert NOTICES[0] not in out + text


def test_a_log_file_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"log file .* cannot be written .*logging.folder"), run_log(rank=0) as log:
        log.write_to(str(tmp_path / "file"))


# -- of a run


@pytest.fixture
def short_run(tmp_path: Path) -> dict[str, Any]:
    return small_run(
        write_tokens(tmp_path / "tokens"),
        tmp_path / "run",
        data={"tokenizer": str(write_tokenizer(tmp_path, VOCAB_SIZE))},
        training={"train_iters": 2},
        schedule={"lr_warmup_iters": 1},
    )


def test_a_run_says_the_same_on_the_terminal_with_a_log_file(
    tmp_path: Path, short_run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path / "config.yaml", short_run))
    assert main(["train", "--config", config, "--logging.folder", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    saved = f"step 2  saved {tmp_path / 'run' / 'checkpoints' / 'step-00000002'}"
    assert err == "" and "step 2/2  loss" in out and saved in out.splitlines()
    assert out.splitlines()[-1] == f"complete: 2 steps, 128 tokens, in {tmp_path / 'run'}"
    text = (tmp_path / "rank-00000.log").read_text()
    assert f"INFO rank 0 megatron_fanformer.train.saves: {saved}" in text
    assert "DEBUG rank 0 megatron_fanformer.checkpoint.saving: writing step 2" in text


def test_every_rank_of_several_writes_its_own(
    run_on_ranks: RunOnRanks, tmp_path: Path, short_run: dict[str, Any]
) -> None:
    short_run["logging"]["folder"] = str(tmp_path / "logs")
    short_run["data"]["train_data"] = [str(tmp_path / "none")]
    run_on_ranks(2, start_here, write_config(tmp_path / "config.yaml", short_run))
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank:05d}.log").read_text()
        assert f"INFO rank {rank} megatron_fanformer.train.start: starting 2 ranks (dp=2)\n" in text
        assert f"ERROR rank {rank} megatron_fanformer.train.run_log: ended by InputError: data.train_data" in text
