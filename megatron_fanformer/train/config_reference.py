"""The output of `megatron-fanformer config`: the list of configuration fields, or a resolved configuration."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

import yaml

from megatron_fanformer.configuration import FieldDescription, describe_fields, field_texts
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import PRESET_KEY, RunConfig, load_config

WIDTH = 80  # columns of text
PRESET = FieldDescription(
    name=PRESET_KEY,
    type="text or null",
    default="null",
    text="One of the paper's sizes (docs/configuration.md#presets), or `from-checkpoint`: that of `checkpoint.load` "
    "(docs/fine-tuning.md#training). Other keys of `model` and `model.fan` replace its values.",
)


def run_sections() -> Iterator[tuple[str, str, list[FieldDescription]]]:
    """Yield name, docstring and fields of each section; `model.preset` is the first field of `model`."""
    texts = field_texts(RunConfig)
    for name, section_class in get_type_hints(RunConfig).items():
        preset = [PRESET] if PRESET_KEY.startswith(f"{name}.") else []
        yield name, texts[name], [*preset, *describe_fields(section_class, f"{name}.")]


def field_list() -> str:
    """Return a text that lists every field, by section, with its type, default and docstring."""
    lines: list[str] = []
    for name, text, fields in run_sections():
        lines += [*textwrap.wrap(f"{name}: {text}", WIDTH), ""]
        for field in fields:
            default = "must be given" if field.default is None else f"default {field.default}"
            lines.append(f"  {field.name}  {field.type}; {default}")
            lines.append(textwrap.fill(field.text, WIDTH, initial_indent="      ", subsequent_indent="      "))
        lines.append("")
    return "\n".join(lines).rstrip()


def resolved_text(file: Path, overrides: Sequence[str]) -> str:
    """Return the whole configuration as YAML, with presets and overrides applied; fields left to the machine stay open.

    Raises:
        InputError: the file cannot be read, or the configuration is invalid on every machine and with any data.
    """
    config = load_config(file, overrides)
    problems = config.section_problems(exclude=["data"])  # its files may be on other machines
    if not config.data.train_data and not config.data.stages:
        problems.append("data.train_data is empty; name token files, or chats")
    if not problems and config.training.train_iters is not None:  # otherwise the steps depend on the data
        problems = config.joint_problems(config.parallel.resolve_data_parallel_size(None))
    if problems:
        raise InputError("\n".join(problems))
    return yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True).rstrip()
