"""What the demo shows of itself: the smoothed loss, and commands to try next that are commands."""

import math
import shlex
from pathlib import Path

import pytest

from megatron_fanformer import cli
from megatron_fanformer.demo.demo import Places, loss_picture, next_lines, smoothed
from megatron_fanformer.experiments.probes.command import read_settings


def test_each_command_to_try_next_is_an_experiment_that_is_accepted() -> None:
    commands = [shlex.split(line) for line in next_lines(Places(Path("a folder"))) if cli.PROGRAM in line]
    assert len(commands) == 3
    for program, *words in commands:
        verb, options = cli.read_command(words)
        assert (program, verb.name) == (cli.PROGRAM, "experiment")
        read_settings(options)


def test_a_smoothed_value_is_the_mean_of_those_so_far_weighed_by_age() -> None:
    values, span = [3.0, 1.0, 4.0, 1.0, 5.0], 2.5
    expected = []
    for number in range(len(values)):
        weights = [math.exp((place - number) / span) for place in range(number + 1)]
        expected.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    assert smoothed(values, span) == pytest.approx(expected, rel=1e-12)


def test_a_run_with_a_skipped_step_is_drawn() -> None:
    metrics = [{"step": 1, "loss": 2.0}, {"step": 2, "skipped": "nan"}, {"step": 3, "loss": 1.0}]
    picture = loss_picture([*metrics, {"step": 4, "loss": 1.0, "validation_loss/web": 1.5}], entropy=3)
    assert picture.startswith(b"\x89PNG")
