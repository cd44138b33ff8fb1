"""What the demo shows of itself: commands to try next, and the one that goes on, are commands."""

import shlex
from pathlib import Path

import pytest
from rich.console import Console

from megatron_fanformer import cli
from megatron_fanformer.demo import demo
from megatron_fanformer.demo.demo import Places, next_lines
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.experiments.probe import read_settings


def test_each_command_to_try_next_is_an_experiment_that_is_accepted() -> None:
    commands = [shlex.split(line) for line in next_lines(Places(Path("a folder"))) if cli.PROGRAM in line]
    assert len(commands) == 3
    for program, *words in commands:
        verb, options = cli.read_command(words)
        assert (program, verb.name) == (cli.PROGRAM, "experiment")
        read_settings(options)


def test_a_demo_that_is_stopped_names_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command would remove what was saved."""

    def stopped(*_arguments: object) -> None:
        raise Interrupted("stopped on SIGINT, saved; run the same command to continue")

    monkeypatch.setattr(demo, "start_run", stopped)
    places = Places(tmp_path / "a folder")
    places.root.mkdir()
    with pytest.raises(Interrupted, match=r"^stopped in its training; the demo would begin anew, and ") as caught:
        demo._train(places, Console(quiet=True))
    command = str(caught.value).partition(", and ")[2].removesuffix(" goes on")
    setting, program, *words = shlex.split(command)
    assert (setting, program) == ("CUDA_VISIBLE_DEVICES=", cli.PROGRAM)  # a GPU, if there is one, stays hidden
    verb, options = cli.read_command(words)
    assert (verb.name, Path(options.config)) == ("train", places.config)
