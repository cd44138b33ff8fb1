"""Configurations and command lines changed at random: each ends in time, with a code of the table, in our own words."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_fanformer.demo import demo
from megatron_fanformer.parity import run as parity_run
from megatron_fanformer.preparation import prepare
from megatron_fanformer.training import start
from tests.faults import commands
from tests.faults.conftest import Things
from tests.faults.mutations import mutated_command, mutated_configuration

SEED = 14
# A configuration may break many rules at once, a line each.
MOST_LINES = 60
CODES = (0, 2, 3)

SOME_CONFIGURATIONS, ALL_CONFIGURATIONS = 50, 2_000
SOME_COMMANDS, ALL_COMMANDS = 60, 1_000


@pytest.fixture(autouse=True)
def accepted_input_ends_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would run for minutes is not under test: commands end where it would begin."""
    check_machine_and_data = start.check_machine_and_data

    def checked(*arguments: object) -> None:
        check_machine_and_data(*arguments)  # type: ignore[arg-type]
        commands.reached()

    monkeypatch.setattr(start, "check_machine_and_data", checked)
    monkeypatch.setattr(demo, "run_demo", commands.reached)
    monkeypatch.setattr(parity_run, "run_layouts", commands.reached)
    monkeypatch.setattr(prepare, "run", commands.reached)


@dataclass
class Outcomes:
    """How commands ended: their codes, and what was wrong with them."""

    codes: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def note(self, arguments: Sequence[str], context: str) -> None:
        """Run a command."""
        try:
            ended = commands.run(arguments)
        except (commands.Hang, Exception) as error:
            self.wrong.append(f"{type(error).__name__} of {context}")
            return
        self.codes.add(ended.code)
        if wrong := ended.unlike(CODES, most_lines=MOST_LINES):
            self.wrong.append(f"{wrong} of {context}: {ended.errors[:500]}")


def names(things: Things) -> list[str]:
    run = (things.config, things.run, things.checkpoint, things.export)
    paths = (*run, things.tokenizer, things.documents, things.pipe)
    return [*map(str, paths), things.tokens, f"@{things.config}", f"@{things.pipe}", str(things.folder / "none")]


def share(some: int, every: int) -> list[object]:
    return [some, pytest.param(every, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])]


@pytest.mark.parametrize("number", share(SOME_CONFIGURATIONS, ALL_CONFIGURATIONS))
def test_mutated_configurations(number: int, things: Things, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    outcomes = Outcomes()
    for case in range(number):
        file = tmp_path / f"{case}.yaml"
        file.write_bytes(mutated_configuration(chance, things.values, [*names(things), "/dev/zero", "/dev/stdin"]))
        verb = chance.choice((["train"], ["train"], ["config", "--resolved"]))
        outcomes.note([*verb, "--config", str(file)], f"{case} {verb[0]} {file.read_bytes()[:2_000]!r}")
    assert not outcomes.wrong, "\n".join(outcomes.wrong[:20])
    assert {0, 2} <= outcomes.codes, "some are accepted still"


@pytest.mark.parametrize("number", share(SOME_COMMANDS, ALL_COMMANDS))
def test_mutated_command_lines(number: int, things: Things, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run, export = str(things.config), str(things.run), str(things.export)
    documents, tokenizer = str(things.documents), str(things.tokenizer)
    sound = (
        ["config", "--resolved", "--config", config, "--training.seed", "1"],
        ["train", "--config", config, "--training.train_iters", "3"],
        ["inspect", things.tokens, "--verify"],
        ["inspect", run, "--json"],
        ["inspect", run, "--step", "1"],
        ["generate", run, "--prompt", "ab", "--max-new-tokens", "2", "--temperature", "1", "--seed", "3"],
        ["convert", run, "out", "--to", "hf", "--no-verify", "--max-shard-size", "1MB"],
        ["convert", export, "out", "--to", "megatron", "--no-verify"],
        ["prepare", documents, "--output", "out", "--tokenizer", tokenizer, "--part-size", "1M"],
        ["parity", "--config", config, "--layouts", "tp=2", "--steps", "2"],
        ["demo", "--output", "out"],
    )
    chance = random.Random(SEED)
    outcomes = Outcomes()
    for case in range(number):
        here = tmp_path / "here"
        here.mkdir()
        monkeypatch.chdir(here)
        arguments = mutated_command(chance, sound, names(things))
        outcomes.note(arguments, f"{case} {arguments!r:.1000}")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(here)
    assert not outcomes.wrong, "\n".join(outcomes.wrong[:20])
    assert {0, 2} <= outcomes.codes, "some are accepted still"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "a" * 300], "cannot be used (File name too long)"),
        (["convert", "RUN", "out", "--to", "hf", "--max-shard-size", "1e400GB"], "is not a size"),
        (["convert", "RUN", "out", "--to", "hf", "--max-shard-size=-5GB"], "is not a size"),
        (["convert", "RUN", "b" * 300, "--to", "hf"], "cannot be used (File name too long)"),
        (["train", "--config", "PIPE"], "it is a pipe, a socket or a device"),
        (["prepare", "@PIPE", "--output", "out", "--tokenizer", "x"], "it is a pipe, a socket or a device"),
    ],
)
def test_a_command_line_that_python_would_answer(
    arguments: list[str], message: str, things: Things, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill: Callable[[str], str] = lambda word: word.replace("RUN", str(things.run)).replace("PIPE", str(things.pipe))  # noqa: E731
    ended = commands.run([fill(word) for word in arguments])
    assert (ended.code, ended.errors.count("\n")) == (2, 1)
    assert message in ended.errors
    assert not list(tmp_path.iterdir())
