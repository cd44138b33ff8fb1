"""A demo that is stopped in its training names the command that goes on."""

import shlex
from pathlib import Path

import pytest
from rich.console import Console

from megatron_fanformer import cli
from megatron_fanformer.demo import demo
from megatron_fanformer.errors import Interrupted


def test_a_demo_that_is_stopped_names_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command would remove what was saved."""

    def stopped(*_arguments: object) -> None:
        raise Interrupted("stopped on SIGINT, saved; run the same command to continue")

    monkeypatch.setattr(demo, "start_run", stopped)
    root = tmp_path / "a folder"
    root.mkdir()
    with pytest.raises(Interrupted, match=r"^stopped in its training; the demo would begin anew, and ") as caught:
        demo._train(root, Console(quiet=True))
    program, *words = shlex.split(str(caught.value).partition(", and ")[2].removesuffix(" goes on"))
    verb, options = cli.read_command(words)
    assert (program, verb.name, Path(options.config)) == (cli.PROGRAM, "train", root / "train.yaml")
