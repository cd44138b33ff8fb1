"""What the demo shows of itself: commands to try next that are commands."""

import shlex
from pathlib import Path

from megatron_fanformer import cli
from megatron_fanformer.demo.demo import Places, next_lines
from megatron_fanformer.experiments.probes.command import read_settings


def test_each_command_to_try_next_is_an_experiment_that_is_accepted() -> None:
    commands = [shlex.split(line) for line in next_lines(Places(Path("a folder"))) if cli.PROGRAM in line]
    assert len(commands) == 3
    for program, *words in commands:
        verb, options = cli.read_command(words)
        assert (program, verb.name) == (cli.PROGRAM, "experiment")
        read_settings(options)
