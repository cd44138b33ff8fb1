"""RunConfig: the sections of a run's configuration joined, read from YAML and dotted overrides, and checked.

Every problem of a configuration is reported together, one line each, before anything is loaded.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser

from megatron_fanformer.checkpoint.config import CheckpointConfig
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import DTYPES, PRESETS, FANformerConfig, PrecisionConfig
from megatron_fanformer.runtime.device import DeviceKind, has_bf16_matrix_units
from megatron_fanformer.runtime.parallel import ParallelConfig
from megatron_fanformer.training.config_values import value_problems, without_empty_sections
from megatron_fanformer.training.fp8_rules import fp8_problems
from megatron_fanformer.training.layout_rules import batch_problems, layout_problems
from megatron_fanformer.training.metrics import LoggingConfig
from megatron_fanformer.training.optimizer import OptimizerConfig
from megatron_fanformer.training.schedule import ScheduleConfig

PRESET_KEY = "model.preset"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The length and the batches of a run."""

    run_dir: str
    """The run's folder: configuration, metrics, TensorBoard and checkpoints."""
    train_iters: int
    """Steps of the whole run."""
    global_batch_size: int
    """Samples a step, over all replicas."""
    micro_batch_size: int = 1
    """Samples that one forward pass of a replica takes."""
    seed: int = 1234
    """Of the initial weights and the order of samples."""
    eval_interval: int | None = None
    """Steps between evaluations; null: at the end only, where there is validation data."""
    eval_iters: int = 10
    """Global batches that an evaluation takes of each validation set."""
    exit_interval: int | None = None
    """Save and end after each step that this divides; the same command then goes on."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        names = (
            "train_iters",
            "global_batch_size",
            "micro_batch_size",
            "eval_interval",
            "eval_iters",
            "exit_interval",
        )
        found = [
            f"training.{name} is {value}; it must be at least 1"
            for name in names
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.seed < 0:
            found.append(f"training.seed is {self.seed}; it must not be negative")
        return found


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that determines a run."""

    model: FANformerConfig
    """The model's shape; `preset` names one of the paper's sizes to start from."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How it is spread over ranks."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig
    """Token files."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    training: TrainingConfig
    """Length and batches."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and starting points."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What is told."""

    def dtype(self, device: DeviceKind) -> torch.dtype:
        """The type of weights and activations; `auto` resolved for the device."""
        if self.precision.dtype == "auto":
            return torch.bfloat16 if has_bf16_matrix_units(device) else torch.float32
        return DTYPES[self.precision.dtype]

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro batches of one replica in a step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * data_parallel_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as config.yaml has them."""
        return dataclasses.asdict(self)

    def problems(self, data_parallel_size: int) -> list[str]:
        """Everything that is wrong with this configuration at that number of replicas, one line each."""
        sections = [getattr(self, section.name) for section in dataclasses.fields(self)]
        found = [problem for section in sections if hasattr(section, "problems") for problem in section.problems()]
        if found:
            return found  # rules between fields make sense on sound fields only
        found += layout_problems(self.model, self.parallel)
        found += fp8_problems(self.model, self.parallel, self.precision, self.training.micro_batch_size)
        found += batch_problems(
            self.parallel, data_parallel_size, self.training.global_batch_size, self.training.micro_batch_size
        )
        found += self.schedule.joint_problems(lr=self.optimizer.lr, train_iters=self.training.train_iters)
        return found


def load_config(file: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply `--section.field VALUE` overrides, and build the RunConfig.

    Raises:
        InputError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    values = _read_yaml(file)
    _apply_overrides(values, overrides)
    return config_from_dict(values)


def config_from_dict(values: dict[str, Any]) -> RunConfig:
    """Build the RunConfig from nested plain values, `model.preset` included.

    Raises:
        InputError: keys are unknown or missing, or values have a wrong type; a line each.
    """
    values = _with_preset(without_empty_sections(values))
    found = list(value_problems(values, RunConfig))
    if found:
        raise InputError("\n".join(found))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--run", type=RunConfig)
    run: RunConfig = parser.instantiate(parser.parse_object({"run": values})).run
    return run


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name a configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no YAML ({' '.join(str(error).split())}); mend it") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no configuration; it must have sections such as model and training")
    return values


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    arguments = list(overrides)
    while arguments:
        key = arguments.pop(0)
        if not key.startswith("--") or "." not in key:
            raise InputError(f"{key!r} is no override; write --section.field VALUE")
        key, has_value, text = key[2:].partition("=")
        if not has_value:
            if not arguments:
                raise InputError(f"--{key} has no value; write --section.field VALUE")
            text = arguments.pop(0)
        _set_nested(values, key.split("."), _parse_value(key, text))


def _parse_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--{key} {text!r} is no YAML value; quote it") from None


def _set_nested(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[path[-1]] = value


def _with_preset(values: dict[str, Any]) -> dict[str, Any]:
    model = values.get("model")
    if not isinstance(model, dict) or model.get("preset") is None:
        return values
    name = model["preset"]
    if not isinstance(name, str) or name not in PRESETS:
        raise InputError(f"{PRESET_KEY} is {name}; it must be one of {', '.join(PRESETS)}")
    merged = dataclasses.asdict(PRESETS[name])
    for key, value in model.items():
        if key == "fan" and isinstance(value, dict):
            merged["fan"] = {**merged["fan"], **value}
        elif key != "preset":
            merged[key] = value
    return {**values, "model": merged}
