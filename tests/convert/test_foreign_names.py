"""Names that other trainers have for a run's settings: what is told about them, and the page of Megatron-LM's."""

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
from collections import Counter

import pytest

from megatron_fanformer.configuration import described_fields, yaml_value
from megatron_fanformer.convert.foreign_names import EARLIER, HUGGING_FACE, MEGATRON_LM, OLMO, answer, plain
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import RunConfig, config_from_dict, load_config
from tests.small_runs import ROOT

EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"
PAGE = ROOT / "docs" / "from-megatron-lm.md"
ROWS = [row for table in (*MEGATRON_LM.values(), HUGGING_FACE, OLMO, EARLIER) for row in table]
FIELDS = [field.name for field in described_fields(RunConfig)]


def message(*overrides: str) -> str:
    with pytest.raises(InputError) as refused:
        load_config(EXAMPLE, overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("optimizer.learning_rate", "did you mean optimizer.lr?"),
        ("training.max_steps", "did you mean training.train_iters?"),
        ("training.per_device_train_batch_size", "did you mean training.micro_batch_size?"),
        ("optimizer.betas", "did you mean optimizer.adam_beta1 (and optimizer.adam_beta2)?"),
        ("optimizer.weight_decy", "did you mean optimizer.weight_decay?"),  # near
        ("training.weight_decay", "did you mean optimizer.weight_decay?"),  # in another section
        ("model.p_ratio", "did you mean model.fan.p_ratio?"),
        ("training.fp16", "not there, because 16-bit numbers are bf16, which needs no loss scale; leave it out"),
        ("evaluation.perplexity.batches", "did you mean evaluation.perplexity.limit_tokens (in tokens, "),
        ("checkpoint.zip", "the keys here are "),  # near nothing
    ],
)
def test_an_unknown_key_is_answered(name: str, answer: str) -> None:
    assert message(f"--{name}", "1").startswith(f"unknown configuration key {name}; {answer}")


def test_all_flags_of_another_trainer_are_answered_at_once() -> None:
    line = ["--num-layers", "4", "--training.seed", "1", "--data-path", "0.3", "a", "--micro-batch-size=2", "--zip"]
    assert message(*line).splitlines() == [
        "'--num-layers' is not an override (--section.field VALUE); did you mean model.num_layers?",
        f"'--data-path' is not an override (--section.field VALUE); {answer('data_path')}",
        "'--micro-batch-size=2' is not an override (--section.field VALUE); did you mean training.micro_batch_size?",
        "'--zip' is not an override; write --section.field VALUE",
    ]


# -- the table


def test_every_answer_is_a_field() -> None:
    assert {row.field for row in ROWS if row.field} <= set(FIELDS)


def test_a_name_has_one_answer() -> None:
    counts = Counter(plain(name) for row in ROWS for name in row.names.split())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="comes with megatron-core 0.19")
def test_the_arguments_are_megatrons_own() -> None:
    from megatron.training.arguments import add_megatron_arguments

    with contextlib.redirect_stdout(io.StringIO()):
        parser = add_megatron_arguments(argparse.ArgumentParser())
    names = {name for table in MEGATRON_LM.values() for row in table for name in row.names.split()}
    assert names - set(parser._option_string_actions) == set()


# -- the page


def test_the_page_has_every_group_of_arguments() -> None:
    assert re.findall(r"<!-- table: arguments of ([\w ]+) -->", PAGE.read_text()) == list(MEGATRON_LM)


def test_the_pages_configuration_is_its_command_line() -> None:
    """Each argument of the command line has its value in the file, or a reason not to be there."""
    page = PAGE.read_text()
    (line,) = re.findall(r"pretrain_gpt\.py (--.*?)\n```", page, re.DOTALL)
    (file,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    config = config_from_dict(yaml_value(file))
    assert config.section_problems(leaving=["data"]) == []
    given: dict[str, list[str]] = {}
    for word in shlex.split(line.replace("\\\n", " ")):
        if word.startswith("--"):
            given[argument := word] = []
        else:
            given[argument].append(word)
    answers = {name: row.field for rows in MEGATRON_LM.values() for row in rows for name in row.names.split()}
    for argument, words in given.items():
        if words and (field := answers[argument]):
            section, name = field.split(".")
            ours = getattr(getattr(config, section), name)
            assert ours == (words if isinstance(ours, list) else yaml_value(words[0])), argument
    assert not config.model.has_fan
    for row in (row for rows in MEGATRON_LM.values() for row in rows):
        is_of_model = (row.field or "").startswith(("model.", "optimizer.")) and not {*row.names.split()} & {*given}
        if is_of_model and (default := re.search(r"by default, not ([\d.e-]+)$", row.note)):
            section, name = row.field.split(".")
            assert getattr(getattr(config, section), name) == yaml_value(default[1]), row.names
