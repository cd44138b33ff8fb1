import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_dolma.py"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the tool hands to the command line, which is not run."""
    seen: list[list[str]] = []
    command_line = ModuleType("megatron_fanformer.cli")
    command_line.main = lambda arguments: seen.append(arguments) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_fanformer.cli", command_line)
    return seen


def run(arguments: list[str]) -> int:
    spec = importlib.util.spec_from_file_location("preprocess_dolma", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code: int = module.main(arguments)
    return code


def test_megatrons_options_become_a_prepare_command(commands: list[list[str]]) -> None:
    options = "--input a b --output-prefix out --tokenizer-model t.model --workers 2 --json-keys content"
    assert run(options.split()) == 3
    expected = "prepare a b --output out --tokenizer t.model --text-field content --workers 2"
    assert commands == [expected.split()]


def test_workers_and_text_field_have_defaults(commands: list[list[str]]) -> None:
    run(["--input", "a", "--output-prefix", "out", "--tokenizer", "t.json"])
    expected = "prepare a --output out --tokenizer t.json --text-field text"
    assert commands == [expected.split()]
