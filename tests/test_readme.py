"""The commands that the documentation shows: each parses, and names what exists."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer import cli
from megatron_fanformer.experiments.probes.command import read_settings
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.training.config import config_from_dict, load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown_commands(page: Path) -> list[list[str]]:
    """Every `megatron-fanformer …` of a page's shell blocks, as its words."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in commands if words and words[0] == "megatron-fanformer"]


COMMANDS = [(page.name, words) for page in PAGES for words in shown_commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in COMMANDS]
)
def test_a_shown_command_parses(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options, rest = cli._parser().parse_known_args(words)
    assert options.verb != "train" or Path(options.config).suffix == ".yaml"
    if options.verb == "experiment":
        assert options.name is None or read_settings(options, rest)
    elif options.verb not in ("train", "plan"):
        assert rest == []
    elif Path(options.config).exists():
        load_config(Path(options.config), rest)


def test_commands_of_every_verb_are_shown() -> None:
    assert {words[0] for _, words in COMMANDS} >= set(cli.VERBS)


def field_names(values: dict[str, Any]) -> Iterator[str]:
    """Of all sections, those within sections among them."""
    for name, value in values.items():
        yield from field_names(value) if isinstance(value, dict) and value else [name]


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
        options, rest = cli._parser().parse_known_args(words)
        assert (program, options.verb) == (cli.PROGRAM, verb)
        assert all("." in word for word in rest[::2]) and (not rest or verb in cli.TAKES_OVERRIDES)


def test_the_shells_completion_knows_verbs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    ask = f'COMP_WORDS=({cli.PROGRAM} "$@"); COMP_CWORD=$#; _shtab_megatron_fanformer; echo "${{COMPREPLY[@]}}"'
    script = f"{capsys.readouterr().out}\n{ask}"
    for typed, completed in (
        (["pari"], "parity"),
        (["plan", "--sear"], "--search"),
        (["train", "--config", "LICEN"], "LICENSE"),
    ):
        done = subprocess.run(
            ["bash", "-c", script, "bash", *typed], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [completed]


def test_the_configuration_page_names_every_field() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    config = config_from_dict(
        {
            "model": {"preset": "fanformer-1b"},
            "data": {"train_data": ["x"]},
            "training": {"run_dir": "r", "train_iters": 1, "global_batch_size": 1},
        }
    )
    assert [name for name in field_names(config.as_dict()) if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_the_configuration_page_has_every_preset() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name in (name for name in PRESETS if not name.endswith(("-transformer", "-same-params"))):
        size, transformer, same = PRESETS[name], PRESETS[f"{name}-transformer"], PRESETS[f"{name}-same-params"]
        head = "untied" if size.untie_embeddings_and_output_weights else "tied"
        shape = [f"`{name}`", size.num_layers, size.hidden_size, size.num_attention_heads, head]
        parameters = [f"{config.num_parameters:,}" for config in (size, transformer, same)]
        assert "| " + " | ".join(map(str, [*shape, *parameters, same.ffn_hidden_size])) + " |\n" in page
