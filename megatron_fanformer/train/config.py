"""RunConfig, the whole configuration of a run: its sections, how they are read and how they are checked.

All problems of a configuration are reported together, one line each, before anything is loaded.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fanformer import terminal
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_folder import CheckpointConfig
from megatron_fanformer.configuration import (
    build,
    describe_fields,
    flatten,
    overlay,
    read_overrides,
    read_values,
    rename_moved_fields,
)
from megatron_fanformer.convert.megatron_names import COUNTERPARTS, plain
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.mixes import first_step, step_problems
from megatron_fanformer.errors import CorruptError, InputError, broken_fields
from megatron_fanformer.evaluate.config import EvaluationConfig
from megatron_fanformer.model.config import PRESETS, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.model.layout_rules import (
    batch_problems,
    document_problems,
    graph_problems,
    layout_problems,
    z_loss_problems,
)
from megatron_fanformer.plan.job import Job, Layers
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.device import has_bf16_matrix_units
from megatron_fanformer.runtime.environment import RunShape
from megatron_fanformer.runtime.layout import MOVED_FIELDS, DeviceKind, ParallelConfig, RuntimeConfig
from megatron_fanformer.stores import is_url
from megatron_fanformer.train.loggers import LoggingConfig
from megatron_fanformer.train.machine_rules import fp8_problems
from megatron_fanformer.train.optimizers import OptimizerConfig
from megatron_fanformer.train.recovery import RecoveryConfig
from megatron_fanformer.train.schedule import ScheduleConfig

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before that
    import torch

PRESET_KEY = "model.preset"
FROM_CHECKPOINT = "from-checkpoint"
RUN_FIELDS = ("seq_length", "rope_scaling")
"""Fields of the model that a run may set although it starts from a checkpoint: the weights fit any sequence length."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The length and the batches of a run."""

    run_dir: str
    """The run's folder."""
    train_iters: int | None = None
    """Steps of the whole run; this or `epochs` must be given."""
    epochs: float | None = None
    """With `data.format` sft, in place of `train_iters`: number of passes over the conversations."""
    global_batch_size: int
    """Samples per step, over all replicas."""
    micro_batch_size: int = 1
    """Samples in one forward pass of a replica."""
    seed: int = 1234
    """Seed of the initial weights and the order of samples."""
    z_loss_coefficient: float = 0.0
    """This times (log Z)² is added to each token's loss in training, where Z is the sum of the exponentials of its
    logits; PaLM and OLMo 2 have 1e-4 and 1e-5. It is logged as `z_loss`, apart from `loss`."""
    eval_interval: int | None = None
    """Steps between evaluations of `valid_data`; null: at the end only."""
    eval_iters: int = 10
    """Global batches of each validation set, always the same ones."""
    exit_interval: int | None = None
    """Save and end (exit code 0) after a step whose number is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and end (exit code 0) after the first step that ends at least this many minutes after the start."""

    @property
    def steps(self) -> int:
        """Number of steps of the run: `train_iters`, once `preflight.with_steps` has converted `epochs`."""
        assert self.train_iters is not None, "training.epochs was not turned into steps"
        return self.train_iters

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        broken = partial(broken_fields, "training", self)
        names = ("train_iters", "global_batch_size", "micro_batch_size", "eval_interval", "eval_iters", "exit_interval")
        lines = [
            *broken("be at least 1", lambda value: value < 1, *names),
            *broken("be above 0", lambda value: value <= 0, "epochs"),
            *broken("be above 0, or null", lambda value: value <= 0, "exit_duration_in_mins"),
            *broken("not be negative", lambda value: value < 0, "seed", "z_loss_coefficient"),
        ]
        if (self.train_iters is None) == (self.epochs is None):
            stated = "neither is given" if self.epochs is None else "both are given"
            lines.append(f"training.train_iters, training.epochs: {stated}; give one, which sets the run's length")
        return lines


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    model: FANformerConfig
    """The model's shape; `preset` names one of the paper's sizes to start from."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over ranks."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementations of the layers."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """The device, threads and communication of the ranks."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig = field(default_factory=DataConfig)
    """Token files."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its settings."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    training: TrainingConfig
    """The run's length and batches."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Recovery from damage and bad numbers."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Tasks and perplexity sets."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and starting points."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Loggers and the intervals of measurements."""

    def dtype(self, device: DeviceKind) -> "torch.dtype":
        """Return the type of weights and activations; for `auto`, the type that suits the device."""
        from megatron_fanformer.model.config import torch_dtype

        if self.precision.dtype == "auto":
            return torch_dtype("bf16" if has_bf16_matrix_units(device) else "fp32")
        return torch_dtype(self.precision.dtype)

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Return the number of micro batches that one replica computes in a step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * data_parallel_size)

    def job(self, data_parallel_size: int, *, layers: Layers, on_cpu: bool) -> Job:
        """Return a training step of this run as input for the formulas of `plan`.

        Args:
            layers: the implementation that computes the layers.
        """
        return Job(
            model=self.model,
            parallel=self.parallel,
            kernels=self.kernels,
            precision=self.precision,
            optimizer=self.optimizer.rule,
            data_parallel_size=data_parallel_size,
            micro_batch_size=self.training.micro_batch_size,
            num_micro_batches=self.num_micro_batches(data_parallel_size),
            layers=layers,
            has_document_ids=self.data.reset_attention_mask,
            on_cpu=on_cpu,
        )

    @property
    def batch_tokens(self) -> int:
        """Number of tokens of a global batch."""
        return self.training.global_batch_size * self.model.seq_length

    def mix_steps(self) -> dict[str, int]:
        """Return the first step of each of `data.stages`, by name, in ascending order of the steps.

        Raises:
            InputError: the name of a stage states no first step.
        """
        steps = {name: first_step(name, batch_tokens=self.batch_tokens) for name in self.data.stages}
        return dict(sorted(steps.items(), key=itemgetter(1)))

    def run_shape(self, ranks: int, *, threads: int | None = None) -> RunShape:
        """Return the facts from which `runtime.environment` derives the environment variables of a process of the run.

        Args:
            threads: threads of the process (`RunShape.threads`).
        """
        runtime, parallel = self.runtime, self.parallel
        return RunShape(
            parallel=parallel,
            replicas=ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size),
            over_nccl=runtime.device != "cpu" and runtime.distributed_backend != "gloo",
            cuda_graphs=self.kernels.cuda_graph_impl != "none",
            deterministic=runtime.deterministic_mode,
            is_after_hopper=devices.is_after_hopper(),
            threads=threads,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return nested plain values, which config.yaml stores."""
        return dataclasses.asdict(self)

    def problems(self, data_parallel_size: int) -> list[str]:
        """Return all problems of this configuration for a number of replicas, one line each."""
        # Rules between sections make sense only if each section is valid by itself.
        return self.section_problems() or self.joint_problems(data_parallel_size)

    def section_problems(self, *, exclude: Sequence[str] = ()) -> list[str]:
        """Return the problems within single sections, one line each.

        Args:
            exclude: names of sections not to check, such as `data`, whose check reads the token files.
        """
        sections = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in exclude]
        return [problem for section in sections if hasattr(section, "problems") for problem in section.problems()]

    def joint_problems(self, data_parallel_size: int) -> list[str]:
        """Return the broken rules between sections for a number of replicas, one line each."""
        return [*self.problems_of_layout(), *self.problems_of_steps(data_parallel_size)]

    def problems_of_layout(self) -> list[str]:
        """Return the broken rules between sections that do not depend on the batch, one line each."""
        problems = [
            *layout_problems(self.model, self.parallel),
            *graph_problems(self.parallel, self.kernels),
            *self.optimizer.joint_problems(self.parallel),
            *z_loss_problems(self.training.z_loss_coefficient, self.kernels),
        ]
        if self.data.reset_attention_mask:
            problems += document_problems(self.parallel, self.kernels)
        if self.kernels.cuda_graph_impl == "local" and not self.evaluation.is_empty:
            problems.append(
                "kernels.cuda_graph_impl is local, whose graphs take micro batches of one shape, but those of tasks "
                "and perplexity sets differ in shape; set it to none, or have `evaluate` score the checkpoints"
            )
        return problems

    def problems_of_steps(self, data_parallel_size: int) -> list[str]:
        """Return the broken rules on batches and the number of steps, one line each."""
        training, problems = self.training, []
        if training.epochs is not None and not self.data.is_chats:
            problems.append(
                f"training.epochs is {training.epochs}, which is only for conversations (data.format sft); set "
                "training.train_iters"
            )
        if training.train_iters is not None:
            names = list(self.data.stages)
            problems += step_problems(names, train_iters=training.train_iters, batch_tokens=self.batch_tokens)
        return [
            *problems,
            *fp8_problems(self.model, self.parallel, self.precision, training.micro_batch_size, self.kernels),
            *batch_problems(self.parallel, data_parallel_size, training.global_batch_size, training.micro_batch_size),
            *self.schedule.joint_problems(lr=self.optimizer.lr, train_iters=training.train_iters),
        ]


def print_on_stderr(notice: str) -> None:
    """Print a notice on stderr, after the program's name."""
    terminal.print_stderr(f"megatron-fanformer: {notice}")


def load_config(
    file: Path, overrides: Sequence[str] = (), *, report: Callable[[str], None] = print_on_stderr
) -> RunConfig:
    """Read a configuration file, apply `--section.field VALUE` overrides, and build the RunConfig.

    Args:
        report: is called with one line if the file or the overrides use earlier names of fields.

    Raises:
        InputError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    values, moved_in_file = rename_moved_fields(read_values(file), MOVED_FIELDS)
    overridden = read_overrides(overrides, advice=advice)
    _report_moved([*moved_in_file, *(name for name in overridden if name in MOVED_FIELDS)], report)
    changes = {MOVED_FIELDS.get(name, name): value for name, value in overridden.items()}  # "": the field is gone
    return _build_config(overlay(values, {name: value for name, value in changes.items() if name}))


def config_from_dict(values: dict[str, Any], *, report: Callable[[str], None] = print_on_stderr) -> RunConfig:
    """Build the RunConfig from nested plain values, which may contain `model.preset`.

    Raises:
        InputError: keys are unknown or missing, or values have a wrong type; one line each.
    """
    values, moved = rename_moved_fields(values, MOVED_FIELDS)
    _report_moved(moved, report)
    return _build_config(values)


def _report_moved(names: list[str], report: Callable[[str], None]) -> None:
    if names:
        changes = ", ".join(f"{name} is now {MOVED_FIELDS[name] or 'gone'}" for name in dict.fromkeys(names))
        report(f"{changes}; change the configuration, since later versions will not read the earlier names")


def _build_config(values: dict[str, Any]) -> RunConfig:
    # A section whose lines are all commented out is null in YAML; it gets its defaults.
    values = {name: value for name, value in values.items() if value is not None}
    data = values.get("data")
    if isinstance(data, dict) and data.get("format") == "sft":  # attention stays within conversations by default
        values["data"] = {"reset_attention_mask": True, **data}
    return build(_expand_preset(values), RunConfig, advice=advice)


def advice(name: str) -> str | None:
    """Suggest fields for a name that RunConfig lacks: the same name in other sections, or Megatron-LM's counterpart."""
    suggestions = [field.name for field in describe_fields(RunConfig) if plain(field.name) == plain(name)]
    if not suggestions and (counterpart := COUNTERPARTS.get(plain(name))):
        suggestions = [str(counterpart)]
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else None


# -- presets


def _expand_preset(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's plain values with `model.preset` replaced by the fields of that model.

    Fields that `model` states beside the preset take precedence.

    Raises:
        InputError: the preset or the checkpoint does not exist, or a field is stated that the checkpoint decides.
        CorruptError: the checkpoint does not name its model.
    """
    model = values.get("model")
    if not isinstance(model, dict) or model.get("preset") is None:
        return values
    name = model["preset"]
    if not isinstance(name, str) or name not in (*PRESETS, FROM_CHECKPOINT):
        raise InputError(f"{PRESET_KEY} is {name}; it must be one of {', '.join((*PRESETS, FROM_CHECKPOINT))}")
    stated = {key: value for key, value in model.items() if key != "preset"}
    if name == FROM_CHECKPOINT:
        checkpoint, preset = _checkpoint_and_model(values)
        # `build` reports keys that no model has.
        if fixed := [key for key in stated if key not in RUN_FIELDS and hasattr(preset, key)]:
            raise InputError(
                f"model.{fixed[0]} is stated, but {PRESET_KEY} is {FROM_CHECKPOINT}, and {checkpoint} has its own; "
                "leave it out"
            )
    else:
        preset = PRESETS[name]
    merged = {**dataclasses.asdict(preset), **stated}
    if isinstance(stated.get("fan"), dict):
        merged["fan"] = {**dataclasses.asdict(preset.fan), **stated["fan"]}
    return {**values, "model": merged}


def _checkpoint_and_model(values: dict[str, Any]) -> tuple[str, FANformerConfig]:
    """Return the run's newest checkpoint, or `checkpoint.load` if the run has none, and that checkpoint's model."""
    fields = flatten(values)  # not checked yet: a value may have a wrong type
    run, load = (fields.get(name) for name in ("training.run_dir", "checkpoint.load"))
    checkpoints = run_folder.complete_checkpoints(Path(run)) if isinstance(run, str) and run else []
    for checkpoint in reversed(checkpoints):
        try:
            return str(checkpoint), run_folder.saved_model(checkpoint)
        except CorruptError:
            continue  # `preflight` reports the damage
    if not isinstance(load, str):
        raise InputError(f"{PRESET_KEY} is {FROM_CHECKPOINT}, but checkpoint.load names none; name one")
    if is_url(load):
        raise InputError(
            f"{PRESET_KEY} is {FROM_CHECKPOINT}, but checkpoint.load is on another store; state the model's fields, or "
            "copy the checkpoint here"
        )
    try:
        path = find_checkpoint(load)
    except InputError as error:
        raise InputError(f"checkpoint.load: {error} ({PRESET_KEY} is {FROM_CHECKPOINT})") from None
    return str(path), run_folder.saved_model(path)
