"""The commands and the Python that the documentation shows parse, and name what exists. (tests/demo runs them.)"""

import ast
import shlex
from pathlib import Path

import pytest

from megatron_fanformer import cli
from megatron_fanformer.experiments.cells import read_sweep
from megatron_fanformer.experiments.probe import read_settings
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.parity.verb import read_layouts
from megatron_fanformer.plan.command import read_request
from megatron_fanformer.train.config import load_config
from tests.shown_commands import COMMANDS, NOT_OURS, NOT_RUN, PYTHON, PYTHON_NOT_RUN, READERS_OWN, Shown
from tests.small_runs import ROOT

EXAMPLE = "examples/tiny-cpu.yaml"
MADE = {word for command in COMMANDS for word in command.text.split() if "> " in command.text}


def check(arguments: list[str]) -> None:
    """Parse arguments as the program does, and read what they name that is here; raises what the program would say."""
    verb, options = cli.read_command([EXAMPLE if word == READERS_OWN else word for word in arguments])
    match verb.name:
        case "train":
            assert load_config(options.config, options.overrides).section_problems(exclude=("data",)) == []
        case "parity":
            read_layouts(options)
        case "plan":
            read_request(options)
        case "sweep":
            assert str(options.file) in MADE or read_sweep(options.file, needs_data=False)
        case "experiment" if options.name is not None:
            read_settings(options)
        case _:
            config = getattr(options, "config", None)
            assert not getattr(options, "overrides", ()) and (config is None or load_config(Path(config)))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_shown_command_is_one(command: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for arguments in command.ours:
        check(arguments)
    others = [] if command.ours else command.programs
    assert [words[0] for words in others if words[0] not in NOT_OURS] == []
    named = [word for words in others for word in words if word.startswith(("tools/", "examples/", "tests/"))]
    assert [word for word in named if not Path(word).exists()] == []


def test_every_reason_is_of_a_command() -> None:
    assert [start for start in NOT_RUN if not any(each.text.startswith(start) and each.ours for each in COMMANDS)] == []
    others = {words[0] for command in COMMANDS if not command.ours for words in command.programs}
    assert others == NOT_OURS.keys()
    assert [start for start in PYTHON_NOT_RUN if not any(each.text.startswith(start) for each in PYTHON)] == []


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_shown_python_parses_and_no_folder_asks_whether_to_run_its_code(block: Shown) -> None:
    """transformers asks for the tokenizer, too: it reads the model's configuration first."""
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    opening = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"]
    assert [
        ast.unparse(call) for call in opening if "trust_remote_code" not in {word.arg for word in call.keywords}
    ] == []


def test_commands_of_every_verb_are_shown() -> None:
    assert {arguments[0] for command in COMMANDS for arguments in command.ours} >= set(cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_ends_with_two_examples_of_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setenv("COLUMNS", "80")
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    examples = shown.partition("\nexamples:\n")[2].replace("\\\n", " ").splitlines()
    assert len(examples) == 2
    for program, *words in map(shlex.split, examples):
        found, options = cli.read_command(words)
        assert (program, found.name) == (cli.PROGRAM, verb)
        assert all("." in word for word in getattr(options, "overrides", ())[::2])


def test_the_configuration_page_has_every_preset() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name in (name for name in PRESETS if not name.endswith(("-transformer", "-same-params"))):
        size, transformer, same = PRESETS[name], PRESETS[f"{name}-transformer"], PRESETS[f"{name}-same-params"]
        head = "untied" if size.untie_embeddings_and_output_weights else "tied"
        shape = [f"`{name}`", size.num_layers, size.hidden_size, size.num_attention_heads, head]
        parameters = [f"{config.num_parameters:,}" for config in (size, transformer, same)]
        assert "| " + " | ".join(map(str, [*shape, *parameters, same.ffn_hidden_size])) + " |\n" in page
