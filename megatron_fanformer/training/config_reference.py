"""`megatron-fanformer config`: every field of a run's configuration, the JSON schema, the resolved configuration."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from megatron_fanformer.configuration import FieldDescription, described_fields, field_texts, json_schema
from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.runtime.layout import MOVED_FIELDS
from megatron_fanformer.terminal import wrapped
from megatron_fanformer.training.config import RunConfig, load_config
from megatron_fanformer.training.presets import FROM_CHECKPOINT, PRESET_KEY

WIDTH = 80  # columns, where there is no terminal
PRESET = FieldDescription(
    name=PRESET_KEY,
    type="text or null",
    default="null",
    text="One of the paper's sizes (docs/configuration.md#presets), or `from-checkpoint`: that of `checkpoint.load` "
    "(docs/fine-tuning.md#training). Other keys of `model` and `model.fan` replace its values.",
)


def run_sections() -> Iterator[tuple[str, str, list[FieldDescription]]]:
    """Yield name, docstring and fields of each section; `model.preset` comes first in its own."""
    texts = field_texts(RunConfig)
    for name, owner in get_type_hints(RunConfig).items():
        fields = list(described_fields(owner, f"{name}."))
        yield name, texts[name], [PRESET, *fields] if PRESET_KEY.startswith(f"{name}.") else fields


def field_list(width: int = WIDTH) -> str:
    """Return every field with its type, default and docstring, by sections, for a terminal of that many columns."""
    lines: list[str] = []
    for name, text, fields in run_sections():
        lines += [*wrapped(f"{name}: {text}", width), ""]
        for field in fields:
            default = "must be given" if field.default is None else f"default {field.default}"
            lines += wrapped(f"{field.name}  {field.type.replace('`', '')}; {default}", width, "  ", "      ")
            lines += wrapped(field.text, width, "      ", "      ")
        lines.append("")
    return "\n".join(lines).rstrip()


def run_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file: `RunConfig`, with presets and the earlier names of fields."""
    schema = json_schema(RunConfig)
    model = schema["$defs"][FANformerConfig.__name__]
    preset = {"description": PRESET.text, "enum": [*PRESETS, FROM_CHECKPOINT, None], "default": None}
    model["properties"] = {"preset": preset, **model["properties"]}
    model["anyOf"] = [{"required": ["preset"]}, {"required": model.pop("required")}]
    hints = get_type_hints(RunConfig)
    for old, new in MOVED_FIELDS.items():
        (old_section, old_field), (new_section, new_field) = old.split("."), new.split(".")
        present = schema["$defs"][hints[new_section].__name__]["properties"][new_field]
        earlier = {**present, "description": f"The earlier name of {new}.", "deprecated": True}
        schema["$defs"][hints[old_section].__name__]["properties"][old_field] = earlier
    return schema


def schema_text() -> str:
    """Return the JSON schema as a file has it."""
    return json.dumps(run_schema(), indent=1, ensure_ascii=False)


def resolved_text(file: Path, overrides: Sequence[str]) -> str:
    """Return the whole configuration as YAML, after presets and overrides; fields left to the machine stay open.

    Raises:
        InputError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    values = dataclasses.asdict(load_config(file, overrides))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip()
