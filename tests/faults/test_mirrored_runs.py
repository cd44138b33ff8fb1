"""Runs with a mirror, and commands on the URL of one: what was lost here comes from there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST
from megatron_fanformer.checkpoint.remote import RemoteRun
from megatron_fanformer.train.metrics import read_metrics
from tests.faults import commands
from tests.faults.conftest import Things
from tests.small_runs import small_run
from tests.train.test_trainer import train, world_size

STEPS = 8

RunOnRanks = Callable[..., list[Any]]


def numbers(run: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(run)]


@pytest.mark.parametrize(
    ("data_parallel_size", "async_save"), [(1, True), pytest.param(2, False, marks=pytest.mark.full)]
)
def test_a_run_whose_folder_is_lost_goes_on_as_if_it_were_not(
    data_parallel_size: int, async_save: bool, things: Things, run_on_ranks: RunOnRanks, tmp_path: Path
) -> None:
    def values(run: str, **checkpoint: Any) -> dict[str, Any]:
        return small_run(
            things.tokens,
            tmp_path / run,
            parallel={"data_parallel_size": data_parallel_size},
            schedule={"lr_warmup_iters": 1},
            training={"train_iters": STEPS, "exit_interval": 5},
            checkpoint={"save_interval": 2, "keep": 1, "async_save": async_save, **checkpoint},
        )

    straight, mirrored = values("straight"), values("run", mirror=f"file://{tmp_path}/there", mirror_keep=2)
    ranks = world_size(straight)
    for _ in range(2):
        run_on_ranks(ranks, train, straight)
    run_on_ranks(ranks, train, mirrored)
    remote = RemoteRun(f"file://{tmp_path}/there")
    assert remote.candidates()[0] == run_folder.checkpoint_name(5)
    shutil.rmtree(tmp_path / "run")
    run_on_ranks(ranks, train, mirrored)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")
    assert len(numbers(tmp_path / "run")) == STEPS
    last = run_folder.latest_checkpoint(tmp_path / "run")
    assert (
        last is not None
        and last.name == run_folder.checkpoint_name(STEPS)
        and remote.manifest_of(last.name) == (last / MANIFEST).read_bytes()
    )
    assert len(remote._step_names()) == 2


@pytest.fixture
def url(things: Things, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a mirror of the sound run; fetched copies are kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    RemoteRun(f"file://{tmp_path}/there").copy(things.checkpoint, keep=None)
    return f"file://{tmp_path}/there"


def test_commands_read_a_url_as_they_read_a_folder(url: str, things: Things, tmp_path: Path) -> None:
    asked = ["--prompt", "a", "--max-new-tokens", "3"]
    here, there = (commands.run(["generate", path, *asked]) for path in (str(things.run), url))
    assert here.output and (there.code, there.output) == (0, here.output), there.errors
    checkpoint = f"{url}/{run_folder.CHECKPOINTS}/{things.checkpoint.name}"
    inspected = commands.run(["inspect", checkpoint, "--verify"])
    assert inspected.code == 0 and "verified: " in inspected.output
    assert not inspected.errors, "it is fetched once"
    assert commands.run(["convert", url, str(tmp_path / "export"), "--to", "hf", "--no-verify"]).code == 0
    loaded = ["--training.run_dir", str(tmp_path / "loaded"), "--training.train_iters", "2", "--checkpoint.load", url]
    begun = commands.run(["train", "--config", str(things.config), *loaded])
    assert begun.code == 0, begun.errors
    assert [path.name for path in (tmp_path / "loaded" / run_folder.LOADED).glob("*/*")] == [things.checkpoint.name]


def test_no_password_is_shown() -> None:
    ended = commands.run(["inspect", "nosuchstore://user:secret@host/run"])
    assert not ended.unlike((2,), most_lines=1)
    assert "nosuchstore://…@host/" in ended.errors and " needs a driver" in ended.errors
    assert "secret" not in ended.errors
